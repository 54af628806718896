// Operators of the simulated accelerator: torch's CPU kernels, run by a stream when it comes to them.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

struct KernelMode {  // autograd, autocast and Python modes have had their turn before a kernel runs
  c10::impl::ExcludeDispatchKeyGuard without{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// A tensor of the same shape over other memory, seen by the kernels of ``key``.
Tensor seen_as(const Tensor& t, c10::DispatchKey key, c10::DataPtr data) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}
Tensor as_cpu(const Tensor& t) {  // does not own its memory, as a kernel does not
  void* at = t.storage().nbytes() ? host_view(t.storage().data()) : nullptr;
  auto made = seen_as(t, c10::DispatchKey::CPU, c10::DataPtr(at, c10::Device(c10::kCPU)));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
Tensor as_meta(const Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                       c10::DispatchKeySet(c10::DispatchKey::Meta), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}
Tensor host_copy(const Tensor& t) {
  auto made = t.clone();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Span span_of(const Tensor& t, bool writes) {
  if (!t.defined() || t.numel() == 0) return {nullptr, nullptr, writes};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  auto* begin = static_cast<const char*>(t.storage().data()) + t.storage_offset() * int64_t(t.itemsize());
  return {begin, begin + (last + 1) * int64_t(t.itemsize()), writes};
}

// Every tensor in an argument or result replaced by what ``f`` makes of it, and every device by ``type``.
template <class F>
IValue each(const IValue& value, c10::DeviceType type, F f) {
  auto one = [&](const Tensor& t) -> Tensor { return t.defined() ? f(t) : t; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(one(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      made.push_back(t.has_value() ? std::optional<Tensor>(one(*t)) : std::nullopt);
    return made;
  }
  return value.isDevice() ? IValue(c10::Device(type)) : value;
}

// What shapes hang on in an argument, added to a key: calls with one key have results of the same shapes. Most Meta
// kernels are Python and take longer than the op, so each key is asked about once. False where there is more to say.
template <class T>
void mark(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void mark(std::string& key, at::IntArrayRef numbers) {
  mark(key, numbers.size());
  for (int64_t n : numbers) mark(key, n);
}
bool describe(std::string& key, const IValue& value) {
  key += value.tagKind();
  if (value.isNone() || value.isGenerator()) return true;
  if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    mark(key, t.defined());
    if (!t.defined()) return true;
    mark(key, t.scalar_type()), mark(key, t.unsafeGetTensorImpl()->is_wrapped_number());
    mark(key, t.sizes()), mark(key, t.strides()), mark(key, t.storage_offset()), mark(key, t.storage().nbytes());
    return true;
  }
  if (value.isList()) {
    const auto items = value.toListRef();
    mark(key, items.size());
    return std::all_of(items.begin(), items.end(), [&](const IValue& item) { return describe(key, item); });
  }
  if (value.isInt()) mark(key, value.toInt());
  else if (value.isDouble()) mark(key, value.toDouble());
  else if (value.isBool()) mark(key, value.toBool());
  else if (value.isString()) key += value.toStringRef() + '\0';
  else return value.isDevice();
  return true;
}

Tensor allocate(int device, at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype) {
  c10::DeviceGuard guard(c10::Device(kSim, c10::DeviceIndex(device)));
  return at::detail::empty_strided_generic(sizes, strides, c10::getDeviceAllocator(kSim),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::typeMetaToScalarType(dtype));
}

void reshape(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto n = at::detail::computeStorageNbytes(sizes, strides, t.itemsize(), size_t(t.storage_offset()));
  if (t.storage().nbytes() < n) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), n);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// ---------------------------------------------------------------- one call of any operator

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> args;
  int device = -1;

  Call(const c10::OperatorHandle& op, Stack* stack) : op(op), schema(op.schema()) {
    args.assign(stack->end() - long(schema.arguments().size()), stack->end());
    stack->erase(stack->end() - long(args.size()), stack->end());
  }

  bool writes(size_t i) const {
    auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  int alias_of(size_t result) const {  // the argument a result is, or is a view of
    auto* mine = schema.returns()[result].alias_info();
    for (size_t i = 0; mine && i < args.size(); ++i)
      if (auto* theirs = schema.arguments()[i].alias_info(); theirs && theirs->beforeSets() == mine->beforeSets())
        return int(i);
    return -1;
  }
  bool gives_view() const {
    for (auto& result : schema.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
  }
  bool gives_tensors() const {
    for (auto& result : schema.returns()) {
      auto type = result.type();
      if (type->kind() == c10::TypeKind::ListType) type = type->castRaw<c10::ListType>()->getElementType();
      if (type->kind() != c10::TypeKind::TensorType) return false;
    }
    return true;
  }

  void find_device() {
    // a CPU scalar may join in, and a CPU index; all else has to be on one device
    const bool may_index = schema.name().find("index") != std::string::npos;
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].isDevice() && device < 0 && args[i].toDevice().has_index()) device = args[i].toDevice().index();
      each(args[i], kSim, [&](const Tensor& t) {
        const bool is_ours = is_sim(t), fits = t.is_cpu() && !writes(i) && (t.dim() == 0 || may_index);
        const bool is_other = is_ours && seen && device != t.device().index();
        TORCH_CHECK((is_ours || fits) && !is_other, "Expected all tensors to be on the same device, but found ",
                    t.device(), " beside sim:", device < 0 ? 0 : device, " (in ", schema.name(), ")");
        if (is_ours) device = t.device().index(), seen = true;
        return t;
      });
    }
    if (device < 0) device = current_device();
  }
  bool seen = false;

  // Random operators draw from the device's generator: a CPU generator of a seed that it gives.
  void draw() {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    for (size_t i = 0; i < args.size(); ++i) {
      if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
      auto from = args[i].isGenerator() ? args[i].toGenerator()
                                        : at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(device));
      TORCH_CHECK(from.device().type() == kSim && from.device().index() == device,
                  "Expected a generator of sim:", device, " but found one of ", from.device());
      std::lock_guard<std::mutex> hold(from.mutex());
      const uint64_t n = from.get_offset();
      from.set_offset(n + 1);
      uint64_t z = from.current_seed() + 0x9e3779b97f4a7c15ull * (n + 1);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
      args[i] = at::detail::createCPUGenerator(z ^ (z >> 31));
      return;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: ", schema.name(), " draws but takes no generator");
  }

  std::vector<Span> spans() const {
    std::vector<Span> found;
    for (size_t i = 0; i < args.size(); ++i)
      each(args[i], kSim, [&](const Tensor& t) {
        if (is_sim(t)) found.push_back(span_of(t, writes(i)));
        return t;
      });
    return found;
  }

  // The arguments and results as the Meta kernel makes them; false where it cannot tell.
  bool foretell(std::vector<IValue>& metas, Stack& results) const {
    if (!gives_tensors() || !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    std::string key = schema.name() + '.' + schema.overload_name();
    mark(key, c10::get_default_dtype_as_scalartype());
    const bool is_described = std::all_of(args.begin(), args.end(), [&](auto& arg) { return describe(key, arg); });
    static auto& told = *new std::unordered_map<std::string, std::pair<std::vector<IValue>, Stack>>();
    static std::mutex lock;
    if (is_described) {
      std::lock_guard<std::mutex> hold(lock);
      if (auto found = told.find(key); found != told.end()) {
        std::tie(metas, results) = found->second;
        return true;
      }
    }
    for (auto& arg : args) metas.push_back(arg.isGenerator() ? IValue() : each(arg, c10::kMeta, as_meta));
    results = metas;
    try {
      KernelMode mode;
      op.callBoxed(&results);
    } catch (const std::exception&) {
      return false;
    }
    std::lock_guard<std::mutex> hold(lock);
    if (is_described) told.emplace(std::move(key), std::make_pair(metas, results));
    return true;
  }
};

void run_view(Call& call, Stack* stack) {
  Stack metas;
  for (auto& arg : call.args) metas.push_back(each(arg, c10::kMeta, as_meta));
  {
    KernelMode mode;
    call.op.callBoxed(&metas);
  }
  for (size_t r = 0; r < metas.size(); ++r) {
    const Tensor base = call.args.at(size_t(call.alias_of(r))).toTensor();
    stack->push_back(each(metas[r], kSim, [&](const Tensor& meta) {
      auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), meta.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
      return made;
    }));
  }
}

// Results whose shapes follow from values: the host waits, and runs the kernel itself.
void run_waiting(Call& call, Stack* stack) {
  count_wait(call.schema.name());
  Stream& stream = current_stream(call.device);
  check(stream, call.schema.name(), call.spans());
  synchronize(stream);
  Stack results;
  std::vector<Tensor> written;
  for (size_t i = 0; i < call.args.size(); ++i)
    results.push_back(each(call.args[i], c10::kCPU, [&](const Tensor& t) {
      if (!is_sim(t)) return t;
      if (!call.writes(i)) return as_cpu(t);
      written.push_back(as_cpu(t).clone());
      return written.back();
    }));
  KernelMode mode;
  call.op.callBoxed(&results);
  auto put = [&](const Tensor& to, const Tensor& from) {
    synchronize(stream);
    as_cpu(to).copy_(from);
  };
  size_t n = 0;
  for (size_t i = 0; i < call.args.size(); ++i)
    each(call.args[i], kSim, [&](const Tensor& t) {
      if (!is_sim(t) || !call.writes(i)) return t;
      const auto& from = written[n++];
      if (t.sizes() != from.sizes()) reshape(t, from.sizes(), from.strides());
      put(t, from);
      return t;
    });
  for (size_t r = 0; r < results.size(); ++r) {
    const int from = call.alias_of(r);
    stack->push_back(from >= 0 ? call.args[size_t(from)] : each(results[r], kSim, [&](const Tensor& t) {
      auto made = allocate(call.device, t.sizes(), t.strides(), t.dtype());
      put(made, t);
      return made;
    }));
  }
}

void run_any(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  if (call.gives_view()) return run_view(call, stack);
  call.find_device();
  c10::DeviceGuard guard(c10::Device(kSim, c10::DeviceIndex(call.device)));
  call.draw();
  std::vector<IValue> metas;
  Stack shapes;
  if (!call.foretell(metas, shapes)) return run_waiting(call, stack);

  for (size_t i = 0; i < call.args.size(); ++i)
    if (call.writes(i) && call.args[i].isTensor() && is_sim(call.args[i].toTensor())) {
      const auto &mine = call.args[i].toTensor(), &wanted = metas[i].toTensor();
      if (mine.sizes() != wanted.sizes()) reshape(mine, wanted.sizes(), wanted.strides());
    }
  auto spans = call.spans();
  Stack given;
  for (auto& arg : call.args)
    given.push_back(each(arg, c10::kCPU, [](const Tensor& t) { return is_sim(t) ? as_cpu(t) : host_copy(t); }));
  std::vector<IValue> fresh;
  for (size_t r = 0; r < shapes.size(); ++r) {
    const int from = call.alias_of(r);
    stack->push_back(from >= 0 ? call.args[size_t(from)] : each(shapes[r], kSim, [&](const Tensor& meta) {
      auto made = allocate(call.device, meta.sizes(), meta.strides(), meta.dtype());
      spans.push_back(span_of(made, true));
      return made;
    }));
    fresh.push_back(from >= 0 ? IValue() : each(stack->back(), c10::kCPU, as_cpu));
  }
  // devices compute a norm in fp32, whatever it is of, and keep its statistics so
  const auto& name = call.schema.name();
  const bool widens = name.find("layer_norm") != std::string::npos || name.find("group_norm") != std::string::npos ||
                      name.find("batch_norm_backward") != std::string::npos;
  launch(current_stream(call.device), name, spans, [op, given, fresh, widens]() mutable {
    KernelMode mode;
    auto wide = [](const Tensor& t) { return at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t; };
    for (size_t i = 0; widens && i < given.size(); ++i) given[i] = each(given[i], c10::kCPU, wide);
    op.callBoxed(&given);
    auto put = [](const Tensor& to, const Tensor& from) {
      if (!to.defined() || !from.defined() || from.numel() == 0) return;  // masked out
      TORCH_CHECK(to.sizes() == from.sizes(), "gave ", from.sizes(), " where ", to.sizes(), " was foretold");
      to.copy_(from);
    };
    for (size_t r = 0; r < fresh.size(); ++r) {
      if (fresh[r].isTensor()) put(fresh[r].toTensor(), given[r].toTensor());
      if (!fresh[r].isTensorList()) continue;
      auto to = fresh[r].toTensorVector(), from = given[r].toTensorVector();
      for (size_t i = 0; i < to.size(); ++i) put(to[i], from[i]);
    }
  });
}

Stack run_named(const char* name, Stack stack) {
  run_any(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
  return stack;
}

// ---------------------------------------------------------------- what has to be written out

int index_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kSim, c10::DeviceIndex(index_of(device))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), c10::getDeviceAllocator(kSim),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}
Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return allocate(index_of(device), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                  c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  std::vector<Span> spans;
  if (is_sim(from)) spans.push_back(span_of(from, false));
  if (is_sim(to)) spans.push_back(span_of(to, true));
  const bool is_between = is_sim(from) && is_sim(to) && from.device() != to.device();
  Stream& stream = current_stream(is_sim(from) ? from.device().index() : to.device().index());
  Tensor source = is_sim(from) ? as_cpu(from) : from;
  // of what is not pinned a copy is made at once; what is pinned is read when the stream comes to it
  if (!is_sim(from) && non_blocking && !from.is_pinned()) source = from.clone();
  if (is_between) wait(stream, record(current_stream(to.device().index())));
  auto copy = [source, target = is_sim(to) ? as_cpu(to) : to] {
    KernelMode mode;
    target.copy_(source);
  };
  const char* what = !is_sim(to) ? "copy to the host" : is_sim(from) ? "copy" : "copy to the device";
  launch(stream, what, spans, copy);
  if (is_between) wait(current_stream(to.device().index()), record(stream));
  if (non_blocking || (is_sim(from) && is_sim(to))) return to;
  count_wait(what);
  synchronize(stream);
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (!is_sim(to)) to.resize_(from.sizes());
  else if (to.sizes() != from.sizes()) reshape(to, from.sizes(), from.strides());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& t) {
  count_wait("item");
  Stream& stream = current_stream(t.device().index());
  auto value = std::make_shared<at::Scalar>();
  launch(stream, "item", {span_of(t, false)}, [value, from = as_cpu(t)] {
    KernelMode mode;
    *value = from.item();
  });
  synchronize(stream);
  return *value;
}

const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (t.sizes() != sizes) reshape(t, sizes, c10::contiguous_strides(sizes));
  return t;
}
Tensor& set_storage_at(Tensor& t, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  t.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  const auto dense = c10::contiguous_strides(sizes);
  reshape(t, sizes, strides.size() == sizes.size() ? strides : at::IntArrayRef(dense));
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage source) {
  const auto n = c10::SymInt(int64_t(source.nbytes() / t.itemsize()));
  return set_storage_at(t, std::move(source), 0, n, c10::SymInt(1));
}
Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_storage_at(t, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, at::kBool)};
  auto kept = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(kept).mul(p < 1 ? 1 / (1 - p) : 0), kept};
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  return run_named("aten::convolution", {x, w, b, stride, padding, dilation, transposed, output_padding, groups})[0]
      .toTensor();
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& g, const Tensor& x, const Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  const std::optional<std::vector<int64_t>> bias_sizes(std::in_place, 1, g.size(1));
  auto r = run_named("aten::convolution_backward", {g, x, w, bias_sizes, stride, padding, dilation, transposed,
                                                     output_padding, groups, mask});
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor()};
}

void record_stream(Tensor& t, at::Stream s) { use_on(t.storage().data(), find_stream(s.device_index(), s.id())); }
bool may_hold(const Tensor& to, const Tensor& from) {  // as between CPU and CUDA: ``to.data = from``
  auto is_plain = [](const Tensor& t) { return t.layout() == c10::kStrided && (is_sim(t) || t.is_cpu()); };
  return (is_plain(to) && is_plain(from)) || to.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}
int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_any>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::item);
  m.impl("resize_", sim::resize);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage_at);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("native_dropout", sim::dropout);
  m.impl("_fused_sdp_choice", sim::attention);
  m.impl("convolution_overrideable", sim::convolution);
  m.impl("convolution_backward_overrideable", sim::convolution_backward);
  m.impl("record_stream", sim::record_stream);
  m.impl("_has_compatible_shallow_copy_type", sim::may_hold);
}

TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32_set_opt_dtype)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
}

// ---------------------------------------------------------------- to Python

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("close", &close_streams);
  m.def("strays", &n_strays);
  m.def("default_generator", [](int d) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(d));
  });
  m.def("settings", [](const py::kwargs& given) {  // sets those given, and returns what all were
    auto& s = settings();
    py::dict before;
    auto one = [&](const char* name, auto& option) {
      before[name] = option.load();
      if (given.contains(name)) option = given[name].template cast<decltype(option.load())>();
    };
    one("delay_us", s.delay_us);
    one("lazy", s.lazy);
    one("poison", s.poison);
    one("eager_reuse", s.eager_reuse);
    one("races", s.races);
    one("waits", s.waits);
    one("capacity", s.capacity);
    return before;
  });
  m.def("on_wait", [](py::object call) {
    if (call.is_none()) return on_wait(nullptr);
    on_wait([held = new py::object(std::move(call))](const std::string& what) {
      py::gil_scoped_acquire gil;
      (*held)(what);
    });
  });
  m.def("count_wait", &count_wait);
  m.def("take_races", &take_races);
  m.def("new_stream", [](int device, int priority) { return make_stream(device, priority, true).id; });
  // ``run`` is called by the stream when it comes to it, with CPU tensors over the memory of those given.
  m.def("launch", [](int device, int64_t stream_id, const std::string& name, const std::vector<Tensor>& reads,
                     const std::vector<Tensor>& writes, py::function run) {
    std::vector<Span> spans;
    std::vector<Tensor> seen;
    for (auto& t : reads) spans.push_back(span_of(t, false)), seen.push_back(as_cpu(t));
    for (auto& t : writes) spans.push_back(span_of(t, true)), seen.push_back(as_cpu(t));
    auto* held = new py::function(std::move(run));
    py::gil_scoped_release release;
    launch(find_stream(device, stream_id), name, spans, [held, seen] {
      py::gil_scoped_acquire gil;
      std::unique_ptr<py::function> mine(held);
      try {
        (*mine)(seen);
      } catch (py::error_already_set& error) {
        throw std::runtime_error(error.what());
      }
    });
  });
}
