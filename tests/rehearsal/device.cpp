// A CUDA device for a build of torch that has none: its memory is host memory of a fixed capacity, its kernels are
// those of the CPU, its copies run as late as streams and events allow, other processes open its memory by handles.
// See device.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t UNIT = 512;  // bytes that torch's allocator rounds to

size_t from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::recursive_mutex& lock() {
  static auto* made = new std::recursive_mutex;
  return *made;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// --- streams: copies wait in them until somebody must see them done ---------------------------------

struct Copy {
  uint64_t number;
  void* to;
  const void* from;
  size_t bytes;
};

struct Streams {
  std::map<StreamId, std::deque<Copy>> waiting;
  std::map<StreamId, uint64_t> given;
  StreamId made = 0;
  int64_t late = 0;      // copies that waited
  int64_t pageable = 0;  // copies that asked not to block, from or to memory that is not pinned

  void run(StreamId id, uint64_t until = UINT64_MAX) {
    Locked held(lock());
    auto& queue = waiting[id];
    while (!queue.empty() && queue.front().number <= until) {
      std::memmove(queue.front().to, queue.front().from, queue.front().bytes);
      queue.pop_front();
    }
  }
  void run_all() {
    Locked held(lock());
    for (auto& [id, queue] : waiting) run(id);
  }
  void add(StreamId id, void* to, const void* from, size_t bytes) {
    Locked held(lock());
    waiting[id].push_back({++given[id], to, from, bytes});
    ++late;
  }
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream = 0;

Stream stream_of(StreamId id) { return Stream(Stream::UNSAFE, Device(CUDA, current_device), id); }

struct Event {
  StreamId stream;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = current_device;
    setDevice(device);
    return Device(CUDA, before);
  }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "CUDA error: invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(++streams().made); }
  Stream getNewStream(Device, int) const override { return stream_of(++streams().made); }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Locked held(lock());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), streams().given[stream.id()]};
  }
  void block(void* event, const Stream&) const override { synchronizeEvent(event); }
  void synchronizeEvent(void* event) const override {
    if (event) streams().run(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->number);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Locked held(lock());
    auto [id, number] = *static_cast<Event*>(event);
    auto& queue = streams().waiting[id];
    return queue.empty() || queue.front().number > number;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }
  DeviceIndex deviceCount() const noexcept override {
    if (std::getenv("REHEARSAL_DEVICES")) return from_environment("REHEARSAL_DEVICES", 1);
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return visible && *visible ? 1 + std::count(visible, visible + std::strlen(visible), ',') : 1;
  }
  bool queryStream(const Stream& stream) const override { return streams().waiting[stream.id()].empty(); }
  void synchronizeStream(const Stream& stream) const override { streams().run(stream.id()); }
  void synchronizeDevice(DeviceIndex) const override { streams().run_all(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// --- memory: one piece, first fit, poisoned while nobody owns it ------------------------------------

// What processes see of each other, in a file per GPU (REHEARSAL_GPUS is how they begin): who holds how much.
struct Ledger {
  static constexpr int PROCESSES = 64;
  struct Row {
    std::atomic<int64_t> pid, bytes;
  };
  Row* rows = nullptr;
  Row* own = nullptr;

  static std::string gpu(int index) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible || !*visible) return std::to_string(index);
    std::istringstream names(visible);
    std::string name;
    for (int i = 0; i <= index; ++i) std::getline(names, name, ',');
    return name;
  }
  Ledger() {
    const char* prefix = std::getenv("REHEARSAL_GPUS");
    if (prefix == nullptr) return;
    auto path = prefix + gpu(current_device);
    int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, PROCESSES * sizeof(Row)) == 0, "no file ", path);
    rows = static_cast<Row*>(mmap(nullptr, PROCESSES * sizeof(Row), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    for (int i = 0; i < PROCESSES && own == nullptr; ++i) {
      int64_t pid = rows[i].pid;
      if (pid == 0 || kill(pid, 0) != 0)
        if (rows[i].pid.compare_exchange_strong(pid, getpid())) own = &rows[i], own->bytes = 0;
    }
    TORCH_CHECK(own, "more than ", PROCESSES, " processes on one GPU");
  }
  size_t others() const {
    size_t sum = 0;
    for (int i = 0; rows && i < PROCESSES; ++i)
      if (&rows[i] != own && rows[i].pid && kill(rows[i].pid, 0) == 0) sum += rows[i].bytes;
    return sum;
  }
};

// The part of the memory's file that says which blocks others may open.
struct Exports {
  static constexpr int64_t SLOTS = 128;
  struct Slot {
    std::atomic<int64_t> serial, readers;
  };
  Slot slots[SLOTS];
};

struct Block {
  size_t bytes;
  StreamId stream;
  std::set<StreamId> used_by;
  std::vector<int64_t> exports;  // slots
};

struct Memory final : c10::DeviceAllocator {
  size_t capacity = from_environment("REHEARSAL_BYTES", size_t{1} << 30) / 4096 * 4096;
  size_t mapped = capacity;
  char* base = nullptr;
  int file = -1;
  Exports* exports = nullptr;
  int64_t serial = 0;
  std::map<size_t, Block> blocks;  // by offset
  std::set<size_t> limbo;          // freed here, still opened by others
  size_t allocated = 0, peak = 0, top = 0, most = 0;
  struct Pool {
    size_t now, most;
  };
  std::map<StreamId, Pool> pools;  // CUDA's allocator gives a freed block again only to the stream that had it
  size_t more = 0;  // bytes that others are said to hold of this device
  // what the driver counts: tensors alone, as if no freed block was kept and none broke into pieces
  bool exact = std::getenv("REHEARSAL_EXACT") != nullptr;
  std::unique_ptr<Ledger> ledger;

  void map() {
    file = memfd_create("rehearsal-gpu", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, mapped + sizeof(Exports)) == 0, "no file for the device's memory");
    base = static_cast<char*>(whole(file, mapped));
    exports = reinterpret_cast<Exports*>(base + mapped);
    ledger = std::make_unique<Ledger>();
    pthread_atfork(nullptr, nullptr, [] { memory_of_parent = true; });
  }
  static void* whole(int file, size_t bytes) {
    void* at = mmap(nullptr, bytes + sizeof(Exports), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "no address space for the device's memory");
    return at;
  }
  size_t others() const { return more + (ledger ? ledger->others() : 0); }
  void grow(size_t to) {
    top = to, most = std::max(most, top);
    count();
  }
  size_t held() const { return exact ? allocated : top; }
  void count() {
    if (ledger && ledger->own) ledger->own->bytes = held();
  }

  size_t fit(size_t size) const {
    size_t at = 0;
    for (auto& [offset, block] : blocks) {
      if (offset - at >= size) break;
      at = offset + block.bytes;
    }
    return at;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &nothing, Device(CUDA, current_device)};
    Locked held(lock());
    TORCH_CHECK(!memory_of_parent, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
                                   "you must use the 'spawn' start method");
    if (base == nullptr) map();
    size_t size = (bytes + UNIT - 1) / UNIT * UNIT, at = fit(size);
    if (at + size > top && at + size > std::min(mapped, capacity) - std::min(capacity, others())) {
      collect();
      at = fit(size);
      if (at + size > top && at + size > std::min(mapped, capacity) - std::min(capacity, others()))
        out_of_memory(bytes);
    }
    blocks[at] = {size, current_stream, {}, {}};
    allocated += size;
    peak = std::max(peak, allocated);
    auto& pool = pools[current_stream];
    pool.now += size, pool.most = std::max(pool.most, pool.now);
    if (at + size > top) grow(at + size);
    else if (exact) count();
    std::memset(base + at, 0xFF, bytes);
    return {base + at, base + at, &release, Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  void free(void* data) {
    if (memory_of_parent) return;
    Locked held(lock());
    auto found = blocks.find(static_cast<char*>(data) - base);
    streams().run(found->second.stream);  // its own stream's order keeps it until then, others must be recorded
    for (auto id : found->second.used_by) streams().run(id);
    for (auto slot : found->second.exports)
      if (exports->slots[slot].readers > 0) {
        limbo.insert(found->first);
        return;
      }
    drop(found);
  }
  void drop(std::map<size_t, Block>::iterator found) {
    for (auto slot : found->second.exports) exports->slots[slot].serial = 0;
    std::memset(base + found->first, 0xFF, found->second.bytes);
    allocated -= found->second.bytes;
    pools[found->second.stream].now -= found->second.bytes;
    blocks.erase(found);
    if (exact) count();
  }
  // Frees what others have closed.
  void collect() {
    Locked held(lock());
    for (auto offset = limbo.begin(); offset != limbo.end();) {
      auto found = blocks.find(*offset);
      bool read = false;
      for (auto slot : found->second.exports) read |= exports->slots[slot].readers > 0;
      offset = read ? std::next(offset) : (drop(found), limbo.erase(offset));
    }
  }
  [[noreturn]] void out_of_memory(size_t bytes) {
    char text[640];
    auto mib = [](size_t value) { return value / 1048576.0; };
    auto ours = capacity - std::min(capacity, others());  // torch has reserved it all by then
    std::snprintf(text, sizeof text,
                  "CUDA out of memory. Tried to allocate %.2f MiB. GPU 0 has a total capacity of %.2f MiB of which "
                  "0.00 MiB is free. Including non-PyTorch memory, this process has %.2f MiB memory in use. Of the "
                  "allocated memory %.2f MiB is allocated by PyTorch, and %.2f MiB is reserved by PyTorch but "
                  "unallocated. If reserved but unallocated memory is large try setting "
                  "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
                  mib(bytes), mib(capacity), mib(ours), mib(allocated), mib(ours - std::min(ours, allocated)));
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
  size_t end() const { return blocks.empty() ? 0 : blocks.rbegin()->first + blocks.rbegin()->second.bytes; }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Locked held(lock());
    if (base == nullptr || memory_of_parent) return;
    size_t from = (end() + 4095) / 4096 * 4096;
    if (from < top) madvise(base + from, std::min(mapped, (top + 4095) / 4096 * 4096) - from, MADV_REMOVE);
    grow(end());
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    Locked held(lock());
    auto found = blocks.find(static_cast<char*>(data.get()) - base);  // not there: another process's
    if (data.get() && found != blocks.end()) found->second.used_by.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& array, size_t now, size_t highest) {
      for (auto& one : array) one.current = now, one.peak = highest;
    };
    set(stats.allocated_bytes, allocated, peak);
    set(stats.reserved_bytes, held(), exact ? peak : most);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {
    peak = allocated, most = top;
    for (auto& [stream, pool] : pools) pool.most = pool.now;
  }
  // What the pools of all streams hold at most since peaks were forgotten, blocks in pieces left out.
  size_t pooled() const {
    size_t sum = 0;
    for (auto& [stream, pool] : pools) sum += pool.most;
    return sum;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    if (base == nullptr && !memory_of_parent) map();
    return {capacity - std::min(capacity, others() + held()), capacity};
  }

  static inline bool memory_of_parent = false;  // after a fork
  static void nothing(void*) {}
  static void release(void* data);
};

Memory& memory() {
  static auto* made = new Memory;
  return *made;
}
void Memory::release(void* data) { memory().free(data); }

// --- memory of other processes ----------------------------------------------------------------------

// Of a block: "PID FILE BYTES SLOT SERIAL", which another process opens while this one lives and has it.
std::string exported(const Tensor& tensor) {
  Locked held(lock());
  streams().run(current_stream);  // the event that travels with a handle covers what was given to the stream so far
  auto& mine = memory();
  auto found = mine.blocks.find(static_cast<char*>(tensor.storage().mutable_data_ptr().get()) - mine.base);
  TORCH_CHECK(found != mine.blocks.end(), "CUDA error: invalid argument");  // another process's memory
  int64_t slot = 0;
  while (slot < Exports::SLOTS && mine.exports->slots[slot].serial) ++slot;
  TORCH_CHECK(slot < Exports::SLOTS, "CUDA error: out of memory");
  mine.exports->slots[slot].readers = 1;
  mine.exports->slots[slot].serial = ++mine.serial;
  found->second.exports.push_back(slot);
  std::ostringstream text;
  text << getpid() << ' ' << mine.file << ' ' << mine.mapped << ' ' << slot << ' ' << mine.serial << ' ' << found->first;
  return text.str();
}

struct Opened {
  char* base;
  size_t mapped;
  int64_t slot, serial;

  explicit Opened(const std::string& handle) {
    std::istringstream text(handle);
    int64_t pid, file;
    size_t offset;
    text >> pid >> file >> mapped >> slot >> serial >> offset;
    auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
    int other = open(path.c_str(), O_RDWR);
    TORCH_CHECK(other >= 0, "CUDA error: invalid resource handle");
    base = static_cast<char*>(Memory::whole(other, mapped));
    close(other);
    at = base + offset;
  }
  bool valid() { return state().serial == serial; }
  Exports::Slot& state() { return reinterpret_cast<Exports*>(base + mapped)->slots[slot]; }
  ~Opened() { munmap(base, mapped + sizeof(Exports)); }
  char* at;
};

Tensor opened(const std::string& handle, int64_t bytes) {
  TORCH_CHECK(handle.compare(0, handle.find(' '), std::to_string(getpid())) != 0, "CUDA error: invalid device context");
  auto memory = std::make_shared<Opened>(handle);
  TORCH_CHECK(memory->valid(), "CUDA error: invalid resource handle");
  auto close = [memory](void*) {
    streams().run_all();
    if (memory->valid()) --memory->state().readers;
  };
  return at::from_blob(memory->at, {bytes}, {1}, close, at::TensorOptions().dtype(at::kByte).device(Device(c10::DeviceType::CUDA, current_device)),
                       Device(c10::DeviceType::CUDA, current_device));
}

// A handle that is not opened after all.
void released(const std::string& handle) {
  Opened memory(handle);
  if (memory.valid()) --memory.state().readers;
}

struct Pinned final : c10::Allocator {
  std::map<const char*, size_t> blocks;
  size_t limit = from_environment("REHEARSAL_PINNED_BYTES", SIZE_MAX);

  c10::DataPtr allocate(size_t bytes) override {
    size_t held = bytes;
    for (auto& [_, size] : blocks) held += size;
    TORCH_CHECK(held <= limit, "CUDA error: out of memory");
    auto* data = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
    blocks[data] = bytes;
    return {data, data, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* data) const {
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    return after != blocks.begin() && data < std::prev(after)->first + std::prev(after)->second;
  }
  static void release(void* data);
};

Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}
void Pinned::release(void* data) {
  streams().run_all();
  pinned().blocks.erase(static_cast<char*>(data));
  std::free(data);
}

}  // namespace

namespace at {  // where the registry looks
struct RehearsalHooks final : CUDAHooksInterface {
  explicit RehearsalHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(::current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return std::exchange(::current_device, index < 0 ? ::current_device : index);
  }
  int getNumGPUs() const override { return deviceCount(); }
  bool isPinnedPtr(const void* data) const override { return pinned().holds(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  Device getDeviceFromPtr(void*) const override { return Device(c10::DeviceType::CUDA, ::current_device); }
  void deviceSynchronize(DeviceIndex) const override { streams().run_all(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto* generator = new Generator(make_generator<CPUGeneratorImpl>(2026));
    return *generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, RehearsalHooks);
}  // namespace at

namespace {

// --- operations -------------------------------------------------------------------------------------

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto data = memory().allocate(bytes);
  auto kept = std::min(bytes, storage->nbytes());
  if (kept) {
    streams().run(current_stream);
    std::memcpy(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && bytes > impl->storage().nbytes())
    resize_storage(impl->storage().unsafeGetStorageImpl(), bytes);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t size = source.nbytes() / self.element_size();
  return at::native::set_storage_cpu_(self, source, 0, size, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return at::native::set_storage_cpu_(self, empty({0}, self.scalar_type(), {}, self.device(), {}, {}).storage(), 0, {0}, {});
}

// The same bytes as a tensor of the host.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  static char nobody;
  void* data = tensor.data_ptr() ? tensor.data_ptr() : &nobody;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(c10::kCPU),
                       Device(c10::kCPU));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  auto& host = self.is_cuda() ? source : self;
  bool crosses = self.is_cuda() != source.is_cuda();
  bool plain = self.is_contiguous() && source.is_contiguous() && self.dtype() == source.dtype() &&
               self.sizes() == source.sizes() && self.numel();
  if (crosses && non_blocking && !pinned().holds(host.data_ptr())) ++streams().pageable;
  bool same_device = self.is_cuda() && source.is_cuda();  // and in order with its stream's kernels only
  if (plain && (same_device || (crosses && non_blocking && pinned().holds(host.data_ptr())))) {
    streams().add(current_stream, self.data_ptr(), source.data_ptr(), self.nbytes());
    return self;
  }
  streams().run(current_stream);
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar item(const Tensor& self) {
  streams().run(current_stream);
  return on_host(self).item();
}

void record_stream(Tensor& self, Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

// Half precision without a mask: flash.py has the operators; else the plain kernel, as flash kernels know neither.
int64_t attention_kernel(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double,
                         bool, std::optional<double>, bool) {
  bool half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  return half && !mask ? 1 : 0;  // SDPBackend
}

// Any other operation: the CPU's, in the order of the stream, random numbers by the device's generator. torch's
// own get copies; those of other libraries the same bytes, as some write where their schema does not say so.
void any(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  streams().run(current_stream);
  auto& arguments = op.schema().arguments();
  auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator" && (*stack)[first + i].isNone())
      (*stack)[first + i] = at::detail::getCUDAHooks().getDefaultGenerator(0);
  auto space = op.schema().getNamespace();
  if (!space || *space == "aten" || *space == "prims") return at::native::cpu_fallback(op, stack);
  for (auto value = stack->begin() + first; value != stack->end(); ++value) {
    if (value->isTensor()) *value = on_host(value->toTensor());
    else if (value->isTensorList()) {
      c10::List<Tensor> changed;
      for (const Tensor& tensor : value->toTensorVector()) changed.push_back(on_host(tensor));
      *value = changed;
    }
  }
  op.callBoxed(stack);
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value)
    if (value->isTensor() && value->toTensor().defined()) *value = value->toTensor().to(Device(c10::DeviceType::CUDA, current_device));
}

// Collectives: those of gloo on the same bytes. With REHEARSAL_NCCL ranks compare operation, shape and type before,
// and where they differ, or one does not come, all wait until the group's time limit as NCCL does.
std::string operation(const c10::OperatorHandle& op) {
  auto name = op.schema().name();
  name = name.substr(name.rfind(':') + 1);
  name.erase(std::remove(name.begin(), name.end(), '_'), name.end());
  std::transform(name.begin(), name.end(), name.begin(), ::toupper);
  return name;
}

void meet(const std::string& name, const std::vector<int64_t>& shape, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!std::getenv("REHEARSAL_NCCL") || group->getSize() == 1) return;
  static std::map<std::string, int64_t> numbers;
  auto number = ++numbers[group->getGroupName()];
  auto limit = std::chrono::milliseconds(from_environment("REHEARSAL_NCCL", 600) * 1000);
  auto start = std::chrono::steady_clock::now();
  std::ostringstream mine;
  mine << name;
  for (auto size : shape) mine << ' ' << size;
  auto store = group->getStore();
  auto key = [&](int rank) {
    return "rehearsal/" + group->getGroupName() + "/" + std::to_string(number) + "/" + std::to_string(rank);
  };
  auto text = mine.str();
  store->set(key(group->getRank()), std::vector<uint8_t>(text.begin(), text.end()));
  bool same = true;
  for (int rank = 0; rank < group->getSize() && same; ++rank) {
    while (!store->check({key(rank)}) && std::chrono::steady_clock::now() - start < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (!store->check({key(rank)})) same = false;
    else {
      auto other = store->get(key(rank));
      same = std::string(other.begin(), other.end()) == text;
    }
  }
  if (same) return;
  store->set(key(group->getRank()), std::vector<uint8_t>());  // whoever comes later waits in vain too
  std::this_thread::sleep_until(start + limit);
  TORCH_CHECK_WITH(DistBackendError, false, "[Rank ", group->getRank(), "] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=",
                   number, ", OpType=", name, ", NumelIn=", shape.empty() ? 0 : shape[0], ", Timeout(ms)=", limit.count(),
                   ") ran for ", limit.count(), " milliseconds before timing out.");
}

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  streams().run(current_stream);
  std::vector<int64_t> shape;
  auto view = [&](const Tensor& tensor) {
    shape.push_back(tensor.numel());
    shape.push_back((int64_t)tensor.scalar_type());
    return on_host(tensor);
  };
  auto host = [&](const c10::List<Tensor>& tensors) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : tensors) changed.push_back(view(tensor));
    return changed;
  };
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  for (auto& value : *stack) {
    if (value.isTensor()) value = view(value.toTensor());
    else if (value.isTensorList()) value = host(value.toTensorList());
    else if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
      c10::List<c10::List<Tensor>> lists;
      for (auto& one : value.toListRef()) lists.push_back(host(one.toTensorList()));
      value = lists;
    } else if (value.isObject() && !group && op.schema().arguments().size()) {
      try {
        group = value.toCustomClass<c10d::ProcessGroup>();
      } catch (const c10::Error&) {  // a reduction
      }
    }
  }
  auto name = operation(op);
  if (group && name != "SEND" && name != "RECV" && name != "SCATTER" && name != "GATHER") meet(name, shape, group);
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  // one kernel on CUDA; without this, torch takes it apart into five tensors
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&any>());
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (auto name : {"allreduce_", "broadcast_", "allgather_", "_allgather_base_", "reduce_scatter_",
                    "_reduce_scatter_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_",
                    "allreduce_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send",
                    "recv_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
}

TORCH_LIBRARY(rehearsal, m) {
  m.def("start", [] {
    c10::SetAllocator(CUDA, &memory(), 1);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  });
  m.def("resize_storage(Tensor(a!) any, int bytes) -> ()", [](const Tensor& tensor, int64_t bytes) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
  });
  m.def("others", [](int64_t bytes) { memory().more = bytes; });
  m.def("exported(Tensor any) -> str", &exported);
  m.def("opened", &opened);
  m.def("released", &released);
  m.def("collect", [] { memory().collect(); });
  m.def("revoke", [] {  // as if the driver took all handles back
    for (auto& slot : memory().exports->slots) slot.serial = 0;
  });
  m.def("on_host(Tensor any) -> Tensor", [](const Tensor& tensor) {
    streams().run(current_stream);
    return on_host(tensor);
  });
  m.def("pooled", [] { return (int64_t)memory().pooled(); });
  m.def("capacity", [](int64_t bytes) { memory().capacity = bytes; });
  m.def("counts", [] { return std::vector<int64_t>{streams().late, streams().pageable, (int64_t)memory().most}; });
  m.def("random_state", [] { return at::Tensor(at::detail::getCUDAHooks().getDefaultGenerator(0).get_state()); });
  m.def("put_random_state(Tensor state) -> ()", [](const Tensor& state) {
    auto generator = at::detail::getCUDAHooks().getDefaultGenerator(0);
    generator.set_state(state);
  });
  m.def("seed", [](int64_t seed) {
    auto generator = at::detail::getCUDAHooks().getDefaultGenerator(0);
    generator.set_current_seed(seed);
  });
}
