# An image for machines with NVIDIA GPUs: the planner and the real stack of `rlhfsim[real-gpu]`.
#
#   docker build -t rlhfsim .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" --user "$(id -u)" rlhfsim \
#       launch plan.json --model ./qwen2.5-7b --settings run.yaml --out runs/a
#
# Seen: the pins of `real-gpu` resolve together, to CUDA 13.0, hence this base; hadolint finds nothing.
# Not seen: an image that was built, or one that ran on a GPU; the base by its digest, which is the one of the
# list for all architectures that public repositories pin.

# devel and not runtime: DeepSpeed compiles its optimizers with nvcc at first use
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92

# bubblewrap: the sandbox of code rewards; libaio, ibverbs: DeepSpeed's file I/O and NCCL over InfiniBand
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ibverbs-providers libaio-dev libibverbs1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
# every release by its hash first, then the project without anything else
COPY requirements/gpu.lock requirements/build.lock /opt/
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --require-hashes -r /opt/build.lock \
    && pip install --no-cache-dir --no-build-isolation --require-hashes -r /opt/gpu.lock
COPY . /opt/rlhfsim
RUN pip install --no-cache-dir --no-build-isolation --no-deps /opt/rlhfsim \
    && rlhfsim --version

# not root; --user takes the rights of who starts it, so that runs belong to them
RUN useradd --create-home --uid 10001 rlhfsim && install -d -o rlhfsim /work
USER rlhfsim
ENV HOME=/home/rlhfsim
WORKDIR /work
ENTRYPOINT ["rlhfsim"]
CMD ["--help"]
