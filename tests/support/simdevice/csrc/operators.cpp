// Operators: one boxed function for all of them. It lends the memory of the device to the CPU's kernel, so that results
// are the CPU's to the bit, and tells the streams what is read and written.
#include "sim.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <unordered_set>

namespace sim {
namespace {

using Names = std::unordered_set<std::string>;

// They take tensors of the host as well, as on CUDA.
const Names kMixesDevices = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                             "aten::_assert_async", "aten::_ctc_loss", "aten::_ctc_loss_backward",
                             "aten::_pack_padded_sequence"};
// Their results depend on values, or go to the host: it waits for them.
const Names kWaits = {"aten::_local_scalar_dense", "aten::bincount", "aten::equal", "aten::masked_select",
                      "aten::nonzero", "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim",
                      "aten::_unique2"};
// PyTorch puts them together in ways that depend on the device: as a whole the CPU's kernel finds its own way.
const std::vector<const char*> kWhole = {"convolution", "convolution_backward", "silu_backward"};

template <class Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(function(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      const bool is_there = tensor.has_value() && tensor->defined();
      made.push_back(is_there ? std::optional<at::Tensor>(function(*tensor)) : tensor);
    }
    return made;
  }
  return value;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack), stream_(current_stream()) {}

  void run() {
    launch(stream_);
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); i++) take(arguments[i], (*stack_)[stack_->size() - arguments.size() + i]);
    refuse_two_devices();
    for (auto& [tensor, is_write] : used_) touch(Region(tensor), stream_, is_write, name_.c_str());
    run_on_cpu();
    twins_.follow();
    const size_t num_returns = schema_.returns().size();
    for (size_t i = 0; i < num_returns; i++) give((*stack_)[stack_->size() - num_returns + i]);
    if (!kWaits.count(name_)) return;
    refuse_to_wait(name_.c_str());
    synchronize_stream(stream_);
  }

 private:
  void take(const c10::Argument& argument, c10::IValue& value) {
    const auto* alias = argument.alias_info();
    const bool is_write = alias && alias->isWrite(), is_view = alias && !is_write;
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      const bool is_own = is_sim(tensor);
      if (is_own && !is_view) used_.emplace_back(tensor, is_write);
      has_own_ |= is_own;
      has_stranger_ |= !is_own && tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0;
      return twins_.to_cpu(tensor);
    });
    if (value.isDevice() && value.toDevice().type() == kSim) value = c10::Device(c10::kCPU);
    if (argument.name() != "generator") return;
    is_given_generator_ = true;
    value = cpu_generator_of(value.isNone() ? default_generator() : value.toGenerator());
  }

  void refuse_two_devices() const {
    TORCH_CHECK(!has_own_ || !has_stranger_ || kMixesDevices.count(name_),
                "Expected all tensors to be on the same device, but found at least two devices, ", device(),
                " and cpu! (", name_, ")");
  }

  void run_on_cpu() {
    InKernel inside;
    std::optional<BorrowedRandomState> borrowed;
    if (!is_given_generator_ && op_.hasTag(at::Tag::nondeterministic_seeded)) borrowed.emplace();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }

  void give(c10::IValue& value) {
    value = map_tensors(value, [&](const at::Tensor& tensor) {
      bool is_fresh = false;
      auto own = twins_.to_sim(tensor, &is_fresh);
      if (is_fresh) touch(Region(own), stream_, true, name_.c_str());
      return own;
    });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  torch::jit::Stack* stack_;
  const int stream_;
  Twins twins_;
  std::vector<std::pair<at::Tensor, bool>> used_;  // and whether it is written
  bool has_own_ = false, has_stranger_ = false, is_given_generator_ = false;
};

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

}  // namespace

// What has a CPU kernel runs it as a whole, though PyTorch could put it together from others.
void register_cpu_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const auto implement = [&](const char* name) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  };
  for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    implement((name.overload_name.empty() ? name.name : name.name + "." + name.overload_name).c_str());
  }
  for (const char* name : kWhole) implement(name);
}

}  // namespace sim
