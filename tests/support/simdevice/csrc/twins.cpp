// Device tensors as CPU tensors on the same memory, for the CPU's kernels, and their results back: without a copy.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace sim {
namespace {

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// The memory of `kept`, which lives as long as this does.
c10::DataPtr borrow(const c10::Storage& kept, c10::Device device) {
  return {const_cast<void*>(kept.data()), new c10::Storage(kept), &drop_storage, device};
}

c10::Storage cpu_storage(c10::DataPtr&& data, size_t size) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, std::move(data), c10::GetCPUAllocator(), true));
}

at::Tensor wrap(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

void follow_one(const at::Tensor& own, const at::Tensor& twin) {
  auto* from = twin.storage().unsafeGetStorageImpl();
  auto* to = own.storage().unsafeGetStorageImpl();
  if (from->data_ptr().get() != to->data_ptr().get()) {
    to->set_data_ptr_noswap(borrow(twin.storage(), device()));
    to->set_nbytes(from->nbytes());
  }
  if (own.sizes() != twin.sizes() || own.strides() != twin.strides() || own.storage_offset() != twin.storage_offset())
    own.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
}

}  // namespace

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim && tensor.has_storage();
}

c10::Storage make_storage(c10::DataPtr&& data, size_t size) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), size, std::move(data), device_allocator(), true));
}

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  const auto& storage = tensor.storage();
  return wrap(cpu_storage(borrow(storage, c10::kCPU), storage.nbytes()), tensor, c10::DispatchKey::CPU);
}

at::Tensor Twins::to_cpu(const at::Tensor& tensor) {
  if (!is_sim(tensor)) return tensor;
  for (auto& [own, twin] : tensors_)
    if (own.is_same(tensor)) return twin;
  c10::Storage memory;
  for (auto& [own, twin] : storages_)
    if (own.is_alias_of(tensor.storage())) memory = twin;
  if (!memory) {
    const auto& storage = tensor.storage();
    memory = cpu_storage({const_cast<void*>(storage.data()), c10::Device(c10::kCPU)}, storage.nbytes());
    storages_.emplace_back(storage, memory);
  }
  auto twin = wrap(memory, tensor, c10::DispatchKey::CPU);
  tensors_.emplace_back(tensor, twin);
  return twin;
}

at::Tensor Twins::to_sim(const at::Tensor& tensor, bool* is_fresh) {
  *is_fresh = false;
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return tensor;
  for (auto& [own, twin] : tensors_)
    if (twin.is_same(tensor)) return own;
  for (auto& [own, twin] : storages_)
    if (twin.is_alias_of(tensor.storage())) return wrap(own, tensor, c10::DispatchKey::PrivateUse1);
  *is_fresh = true;
  return adopt(tensor);
}

at::Tensor Twins::adopt(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage own;
  if (!storage.data() || is_device(storage.data())) {
    own = make_storage(borrow(storage, device()), storage.nbytes());
  } else {  // memory that was there before the kernel ran
    own = make_storage(device_allocator()->allocate(storage.nbytes()), storage.nbytes());
    std::memcpy(own.mutable_data(), storage.data(), storage.nbytes());
  }
  storages_.emplace_back(own, storage);
  return wrap(own, tensor, c10::DispatchKey::PrivateUse1);
}

void Twins::follow() {
  for (auto& [own, twin] : tensors_) follow_one(own, twin);
}

}  // namespace sim
