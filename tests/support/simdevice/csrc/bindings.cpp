// Python's view of the device: what PyTorch itself does not ask of it.
#include "collectives.h"

#include <ATen/core/CachingHostAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {
namespace {

std::map<std::string, int64_t> host_memory_stats() {
  const auto stats = at::getHostAllocator(kSim)->get_stats();
  return {{"allocations.current", stats.allocations.current},
          {"allocated_bytes.current", stats.allocated_bytes.current},
          {"allocated_bytes.peak", stats.allocated_bytes.peak},
          {"active_requests.current", stats.active_requests.current},
          {"active_bytes.current", stats.active_bytes.current},
          {"active_bytes.peak", stats.active_bytes.peak},
          {"num_host_alloc", stats.num_host_alloc},
          {"num_host_free", stats.num_host_free}};
}

// `tensor.data = other` where the two are on different devices.
void set_data(const at::Tensor& tensor, const at::Tensor& other) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();  // is of the other device
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  install_cpu_allocator();
  register_hooks();
  register_cpu_kernels();
  py::class_<Settings>(m, "Settings")
      .def_readwrite("capacity", &Settings::capacity)
      .def_readwrite("fraction", &Settings::fraction)
      .def_readwrite("fail_after", &Settings::fail_after)
      .def_readwrite("patience", &Settings::patience)
      .def_readwrite("races", &Settings::races)
      .def_readwrite("sync_debug", &Settings::sync_debug)
      .def_readwrite("lazy", &Settings::is_lazy)
      .def_readwrite("poison", &Settings::is_poisoned);
  m.attr("settings") = py::cast(&settings(), py::return_value_policy::reference);
  m.def("races", [] { return races(); });
  m.def("clear_races", [] { races().clear(); });
  m.def("pending", &pending);
  m.def("host_memory_stats", &host_memory_stats);
  m.def("reset_peak_host_memory_stats", [] { at::getHostAllocator(kSim)->reset_peak_stats(); });
  m.def("empty_host_cache", [] { at::getHostAllocator(kSim)->empty_cache(); });
  m.def("host_register", [](int64_t address, size_t size) { register_host_memory(reinterpret_cast<void*>(address), size); });
  m.def("host_unregister", [](int64_t address) { unregister_host_memory(reinterpret_cast<void*>(address)); });
  m.def("default_generator", [] { return default_generator(); });
  m.def("set_data", &set_data);
  m.def("make_backend", &make_backend);
}
