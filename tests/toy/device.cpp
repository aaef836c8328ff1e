// A device that is not the CPU and needs no hardware: torch's backend key for HPUs over plain memory.  Every operation
// runs on the CPU behind its back, but tensors of the two devices do not mix: whoever forgets a copy gets an error.
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <torch/library.h>
#include <torch/extension.h>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace {
using at::Tensor;
constexpr auto kToy = c10::DeviceType::HPU;
std::atomic<int64_t> held{0}, most{0};

struct Block { void* data; int64_t nbytes; };
void give(void* context);
void note_allocation(const void* data);
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(kToy, 0);
    if (nbytes == 0) return {nullptr, nullptr, &give, device};
    void* data = c10::alloc_cpu(nbytes);
    held += nbytes;
    if (held > most) most = held.load();
    auto* block = new Block{data, static_cast<int64_t>(nbytes)};
    note_allocation(data);
    return {data, block, &give, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, std::size_t count) const override { std::memcpy(into, from, count); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kToy, &allocator);
// Streams.  The default one computes at once.  A copy that need not be waited for, in any other, happens when the host
// waits for it, or when the default stream was told to and computes: as late as it may.  Whoever forgets to wait reads
// what was there before, or lets the copy read what came later.
struct Stream {
  std::deque<std::function<void()>> jobs;
  int64_t queued = 0, done = 0;
  int64_t seen = 0;  // how much of the default stream it has waited for
};
struct Event { int64_t stream, upto, clock; };
std::recursive_mutex busy;
// Held while this file's state is used.  Copying a tensor that Python knows may ask for the interpreter's lock, so who
// waits for this one lets go of that one: two threads would wait for each other.
struct Lock {
  Lock() {
    if (busy.try_lock()) return;
    PyThreadState* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    busy.lock();
    if (python) PyEval_RestoreThread(python);
  }
  ~Lock() { busy.unlock(); }
  Lock(const Lock&) = delete;
};
std::map<int64_t, Stream> streams;
thread_local int64_t current = 0;
int64_t clock_ = 0, late = 0;  // operations of the default stream; copies that happened when they were waited for
// The last operation of the default stream that used each block of memory, or was asked for before it was allocated.
std::map<const void*, int64_t> used;
uint64_t seed = 0;  // of the schedule of copies; 0: each copy happens as late as it may
uint64_t draw() {  // xorshift
  seed ^= seed << 13;
  seed ^= seed >> 7;
  return seed ^= seed << 17;
}

// What the host does to streams, in its order, while it is logged (schedule.py).
struct Step {
  const char* what;
  int64_t stream, value;  // value: bytes of a copy, identity of an event
  bool to_host;
  std::string text;
};
std::vector<Step> steps;
bool is_logging = false;
thread_local int fallbacks = 0;
void log(const char* what, int64_t stream, int64_t value = 0, bool to_host = false, std::string text = "") {
  if (is_logging && fallbacks == 0) steps.push_back({what, stream, value, to_host, std::move(text)});
}

void drain(Stream& stream, int64_t upto) {
  while (stream.done < upto) {
    auto job = std::move(stream.jobs.front());
    stream.jobs.pop_front();
    ++stream.done;
    job();
  }
}
void queue(Stream& stream, std::function<void()> job) {
  stream.jobs.push_back(std::move(job));
  ++stream.queued;
}
// Memory that was freed when the default stream had been told to wait: it is free for what that stream does afterwards.
std::map<const void*, Block*> freed;
void note_allocation(const void* data) {
  Lock lock;
  used[data] = clock_;
}
void use(const Tensor& t) {  // by an operation of the default stream
  if (t.defined() && t.device().type() == kToy && current == 0) used[t.storage().data()] = clock_;
}
void compute() {  // an operation is about to run in the current stream
  Lock lock;
  clock_ += current == 0;
  for (auto& [id, stream] : streams)  // at random, some copies happen before anything waits for them
    if (seed != 0 && draw() % 4 == 0) drain(stream, stream.done + draw() % (stream.queued - stream.done + 1));
  drain(streams[current], streams[current].queued);
  if (!streams[0].jobs.empty()) return;
  for (auto& [data, block] : freed) {
    c10::free_cpu(block->data);
    delete block;
  }
  freed.clear();
}
void give(void* context) {
  Lock lock;
  auto* block = static_cast<Block*>(context);
  held -= block->nbytes;
  if (!streams[0].jobs.empty()) {
    freed[block->data] = block;
    return;
  }
  c10::free_cpu(block->data);
  delete block;
}
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kToy; }
  c10::Device exchangeDevice(c10::Device d) const override { return d; }
  c10::Device getDevice() const override { return c10::Device(kToy, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int64_t> last{0};
    return of(++last);
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return of(std::exchange(current, s.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {s.id(), streams[s.id()].queued, clock_};
    log("record", s.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const c10::Stream& s) const override {
    Lock lock;
    auto seen = *static_cast<Event*>(event);
    log("wait", s.id(), reinterpret_cast<int64_t>(event));
    if (seen.stream == 0) streams[s.id()].seen = std::max(streams[s.id()].seen, seen.clock);
    queue(streams[s.id()], [seen] { drain(streams[seen.stream], seen.upto); });
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    auto* seen = static_cast<Event*>(event);
    return streams[seen->stream].done >= seen->upto;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& s) const override { return streams[s.id()].done == streams[s.id()].queued; }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock;
    log("host waits for stream", s.id());
    drain(streams[s.id()], streams[s.id()].queued);
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    log("host waits", 0, reinterpret_cast<int64_t>(event));
    drain(streams[static_cast<Event*>(event)->stream], static_cast<Event*>(event)->upto);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock lock;
    for (auto& [id, stream] : streams) log("host waits for stream", id);
    for (auto& [id, stream] : streams) drain(stream, stream.queued);
  }
  static c10::Stream of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kToy, 0), id); }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard);

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};
// The same memory as a CPU tensor.
Tensor seen(const Tensor& t) {
  auto nbytes = t.storage().nbytes();
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), nbytes,
      c10::DataPtr(t.storage().mutable_data(), c10::Device(at::kCPU)), nullptr, false);
  auto out = at::empty({0}, options);
  return out.set_(storage, t.storage_offset(), t.sizes(), t.strides());
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
      c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::HPU), c10::dtype_or_default(dtype));
}
Tensor as_cpu(const Tensor& t) { return t.device().type() == kToy ? seen(t) : t; }
struct Place {  // of a tensor that a copy will need; nothing is kept alive for it
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  void* data;
  size_t nbytes;
  explicit Place(const Tensor& t) : storage(t.storage().getWeakStorageImpl()), sizes(t.sizes().vec()),
      strides(t.strides().vec()), offset(t.storage_offset()), dtype(t.scalar_type()),
      data(t.storage().mutable_data()), nbytes(t.storage().nbytes()) {}
  Tensor seen() const {
    auto held = storage.lock();
    TORCH_CHECK(held.defined() || freed.count(data), "memory was given up before a copy that needs it was over");
    auto bytes = c10::Storage(c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(data, c10::Device(at::kCPU)), nullptr, false);
    return at::empty({0}, at::TensorOptions().dtype(dtype).device(at::kCPU)).set_(bytes, offset, sizes, strides);
  }
};
void copy_late(const Place& from, const Place& into) {
  at::AutoDispatchBelowADInplaceOrView below;
  ++late;
  into.seen().copy_(from.seen());
}
// Copies between the device and the host, while they are recorded: what a program asks for, not what the fallback does.
struct Copy {
  bool to_host, is_async;  // async: in a stream of its own, and not waited for
  std::string source, target;  // dtypes
  int64_t nbytes;
  uintptr_t host;  // address of the host's elements
};
std::vector<Copy> copies;
bool is_recording = false;
int64_t reads = 0;  // of single values by the host

void record(const Tensor& self, const Tensor& dst, bool non_blocking) {
  bool to_host = self.device().type() == kToy;
  if (!is_recording || fallbacks > 0 || to_host == (dst.device().type() == kToy)) return;
  const Tensor& host = to_host ? dst : self;
  copies.push_back({to_host, current != 0 && non_blocking, c10::toString(self.scalar_type()),
      c10::toString(dst.scalar_type()), dst.numel() * static_cast<int64_t>(dst.element_size()),
      reinterpret_cast<uintptr_t>(host.const_data_ptr())});
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Lock lock;
  record(self, dst, non_blocking);
  bool to_host = dst.device().type() != kToy;
  bool crosses = to_host != (self.device().type() != kToy);
  log(crosses ? "copy" : "compute", current, dst.nbytes(), to_host);
  if (crosses && !non_blocking) log("host waits for stream", current);
  if (current == 0 || !non_blocking) {
    compute();
    use(self);
    use(dst);
    as_cpu(dst).copy_(as_cpu(self));
    return dst;
  }
  const void* data = (self.device().type() == kToy ? self : dst).storage().data();
  TORCH_CHECK(streams[current].seen >= used[data], "a stream copies memory without having waited for its last use");
  queue(streams[current], [from = Place(self), into = Place(dst)] { copy_late(from, into); });
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) const_cast<Tensor&>(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Scalar local_scalar(const Tensor& self) {
  compute();
  log("host waits for stream", current);
  reads += is_recording && fallbacks == 0;
  return seen(self).item();
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), at::OptionalIntArrayRef(C10_AS_INTARRAYREF_SLOW(stride)), false);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, source, 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

void check(const Tensor& t, bool& toy, bool& cpu) {
  if (!t.defined()) return;
  if (t.device().type() == kToy) toy = true;
  else if (t.dim() > 0) cpu = true;
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool toy = false, cpu = false;
  auto count = op.schema().arguments().size();
  for (const auto& value : torch::jit::last(*stack, count)) {
    if (value.isTensor()) check(value.toTensor(), toy, cpu);
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) check(t, toy, cpu);
    else if (value.isOptionalTensorList()) {}
  }
  compute();
  log("compute", current);
  for (const auto& value : torch::jit::last(*stack, count)) {
    if (value.isTensor()) use(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) use(t);
  }
  TORCH_CHECK(!(toy && cpu), "tensors of two devices in ", op.schema().name(), ": one on the toy device, one on the CPU");
  ++fallbacks;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --fallbacks;
    throw;
  }
  --fallbacks;
}
}  // namespace

namespace at { REGISTER_HPU_HOOKS(HPUHooks) }

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
}
TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("held_bytes", [] { return held.load(); });
  m.def("most_bytes", [] { return most.load(); });
  m.def("late_copies", [] { return late; });
  m.def("draw_schedule", [](uint64_t number) { seed = number; }, "Let copies happen at random times; 0: as late as they may.");
  m.def("forget_most", [] { most = held.load(); });
  m.def("record_copies", [] { copies.clear(); reads = 0; is_recording = true; });
  m.def("log_steps", [] { steps.clear(); is_logging = true; });
  m.def("mark", [](const std::string& text) { Lock lock; log("mark", current, 0, false, text); });
  m.def("logged_steps", [] {
    is_logging = false;
    py::list found;
    for (const auto& step : steps) found.append(py::make_tuple(step.what, step.stream, step.value, step.to_host, step.text));
    return found;
  });
  m.def("recorded_copies", [] {
    is_recording = false;
    py::list found;
    for (const auto& copy : copies)
      found.append(py::make_tuple(copy.to_host, copy.is_async, copy.source, copy.target, copy.nbytes, copy.host));
    return py::make_tuple(found, reads);
  });
}
