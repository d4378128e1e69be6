// Random numbers: Mersenne twisters as on the CPU, one for each generator of the device.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {
namespace {

struct GeneratorImpl final : c10::GeneratorImpl {
  at::Generator twister = at::detail::createCPUGenerator();

  GeneratorImpl() : c10::GeneratorImpl(sim::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { twister.set_current_seed(seed); }
  uint64_t current_seed() const override { return twister.current_seed(); }
  uint64_t seed() override { return twister.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simulated device: its generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "simulated device: its generators have no offset"); }
  void set_state(const c10::TensorImpl& state) override { twister.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return twister.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new GeneratorImpl();
    made->twister = twister.clone();
    return made;
  }
};

}  // namespace

at::Generator make_generator() { return at::make_generator<GeneratorImpl>(); }

at::Generator& default_generator() {
  static auto* generator = [] {
    auto* made = new at::Generator(make_generator());
    made->set_current_seed(c10::default_rng_seed_val);
    return made;
  }();
  return *generator;
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  if (generator.device().type() != kSim) return generator;
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->twister;
}

BorrowedRandomState::BorrowedRandomState()
    : cpu_(at::detail::getDefaultCPUGenerator()), own_(cpu_generator_of(default_generator())), kept_(cpu_.get_state()) {
  cpu_.set_state(own_.get_state());
}

BorrowedRandomState::~BorrowedRandomState() {
  own_.set_state(cpu_.get_state());
  cpu_.set_state(kept_);
}

}  // namespace sim
