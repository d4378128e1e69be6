// Strided memory: copies of it, and the poison that shows who reads too early.
#include "sim.h"

#include <ATen/RedispatchFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

namespace sim {
namespace {

at::Tensor tensor_at(const Region& region) {
  const auto options = at::TensorOptions().dtype(region.dtype).device(at::kCPU);
  return at::from_blob(region.data, region.sizes, region.strides, options);
}

// As bytes, with one dimension more.
Region bytes_of(const Region& region) {
  Region bytes = region;
  const auto width = int64_t(c10::elementSize(region.dtype));
  for (auto& stride : bytes.strides) stride *= width;
  bytes.sizes.push_back(width);
  bytes.strides.push_back(1);
  bytes.dtype = at::kByte;
  return bytes;
}

}  // namespace

Region::Region(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), dtype(tensor.scalar_type()) {
  if (tensor.numel() == 0) return;
  data = const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr()));
  int64_t span = 1;
  for (size_t i = 0; i < sizes.size(); i++) span += (sizes[i] - 1) * strides[i];
  begin = data;
  end = data + span * int64_t(c10::elementSize(dtype));
}

bool Region::is_dense() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

size_t Region::num_bytes() const {
  size_t numel = 1;
  for (auto size : sizes) numel *= size_t(size);
  return numel * c10::elementSize(dtype);
}

Region Region::packed_at(char* address) const {
  Region packed = *this;
  packed.data = packed.begin = address;
  packed.end = address + num_bytes();
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    packed.strides[i] = stride;
    stride *= sizes[i];
  }
  return packed;
}

void copy_region(const Region& target, const Region& source) {
  if (target.is_empty() || source.is_empty()) return;
  const bool is_plain = target.dtype == source.dtype && target.sizes == source.sizes;
  if (is_plain && target.is_dense() && source.is_dense()) {
    std::memmove(target.data, source.data, target.num_bytes());
    return;
  }
  // Straight to the CPU's kernel: a copy that happens late is none of the modes' business that are active by then.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  InKernel not_for_a_kernel(false);
  auto written = tensor_at(target);
  at::redispatch::copy_(c10::DispatchKeySet(c10::DispatchKey::CPU), written, tensor_at(source), false);
}

void poison(const Region& region) {
  if (region.is_empty()) return;
  if (region.is_dense()) {
    std::memset(region.begin, 0xFF, region.end - region.begin);
    return;
  }
  char byte = char(0xFF);
  Region target = bytes_of(region), source = target;
  source.data = &byte;
  for (auto& stride : source.strides) stride = 0;
  copy_region(target, source);
}

}  // namespace sim
