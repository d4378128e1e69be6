#pragma once
#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>  // heavy: not for all files

namespace sim {
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& inner);
}
