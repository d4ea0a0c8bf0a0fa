# An image for machines with NVIDIA GPUs: the planner and the real stack of `rlhfsim[real-gpu]`.
#
#   docker build -t rlhfsim .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" rlhfsim \
#       launch plan.json --model ./qwen2.5-7b --settings run.yaml --out runs/a
#
# Seen: the pins of `real-gpu` resolve together, to CUDA 13.0, hence this base; hadolint finds nothing.
# Not seen: an image that was built, or one that ran on a GPU.

# devel and not runtime: DeepSpeed compiles its optimizers with nvcc at first use
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# bubblewrap: the sandbox of code rewards; libaio, ibverbs: DeepSpeed's file I/O and NCCL over InfiniBand
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ibverbs-providers libaio-dev libibverbs1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH
COPY . /opt/rlhfsim
# ninja: DeepSpeed's builds
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir "/opt/rlhfsim[real-gpu]" ninja==1.13.0 \
    && rlhfsim --version

WORKDIR /work
ENTRYPOINT ["rlhfsim"]
CMD ["--help"]
