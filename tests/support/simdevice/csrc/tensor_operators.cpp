// Operators that make, view, copy and resize tensors: they are about memory, and have no kernel.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, type);
}

// The numbers as `target` is to hold them: memory is copied as it is, and views may be conjugated or negated.
at::Tensor written_as(const at::Tensor& target, at::Tensor source) {
  if (source.is_conj() != target.is_conj()) source = at::conj_physical(source.is_conj() ? source.conj() : source);
  if (source.is_neg() != target.is_neg()) source = at::neg(source.is_neg() ? source._neg_view() : source);
  return source;
}

at::Tensor copy_from(const at::Tensor& given, const at::Tensor& target, bool is_non_blocking) {
  auto source = written_as(target, given);
  if (source.sizes() != target.sizes()) source = source.expand(target.sizes());
  if (target.numel() == 0) return target;
  const int stream = current_stream();
  const Region from(source), to(target);
  const bool is_to_host = !is_sim(target), crosses = is_sim(source) == is_to_host;
  if (crosses && is_non_blocking && is_pinned(is_to_host ? to.data : from.data)) {
    queue_copy(to, from, is_to_host, stream);
    return target;
  }
  if (crosses) refuse_to_wait("a blocking copy");
  {
    Lock lock(mutex());  // not held while `target` is copied for the caller: see Lock
    launch(stream);
    touch(from, stream, false, "a copy");
    touch(to, stream, true, "a copy");
    if (crosses) synchronize_stream(stream);
    copy_region(to, from);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes && !format.has_value()) return self;
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = size_t(impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, make_storage(device_allocator()->allocate(0), 0), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) { use_on_stream(self, int(stream.id())); }

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // put together from other operators: there is no fused kernel
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", choose_attention);
}

// Else they would make a copy first, which needs this operator.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

void resize_storage(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  auto made = device_allocator()->allocate(size);
  const size_t common = std::min(size, impl->nbytes());
  if (common && impl->data_ptr().get()) {
    launch(current_stream());
    std::memcpy(made.get(), impl->data_ptr().get(), common);
  }
  impl->set_data_ptr_noswap(std::move(made));
  impl->set_nbytes(size);
}

}  // namespace sim
