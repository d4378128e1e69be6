// A process group that lends the device's memory to one of the host (gloo). Its collectives have a stream of their own,
// as NCCL's: it waits for the current one, and the program has to wait for it.
#include "collectives.h"

namespace sim {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

struct SimWork final : Work {
  Event event;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override { return query(event); }
  bool wait(std::chrono::milliseconds) override {
    sim::wait(current_stream(), event);
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class SimBackend final : public c10d::Backend {
 public:
  explicit SimBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), stream_(new_stream()) {}
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", {}, tensors, [&](Tensors&, Tensors& out) { return inner_->broadcast(out, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("allreduce", {}, tensors, [&](Tensors&, Tensors& out) { return inner_->allreduce(out, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run("reduce", {}, tensors, [&](Tensors&, Tensors& out) { return inner_->reduce(out, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& lists, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors flat;
    for (auto& list : lists) flat.insert(flat.end(), list.begin(), list.end());
    return run("allgather", inputs, flat, [&](Tensors& in, Tensors& out) {
      std::vector<Tensors> nested;
      auto next = out.begin();
      for (auto& list : lists) {
        nested.emplace_back(next, next + int64_t(list.size()));
        next += int64_t(list.size());
      }
      return inner_->allgather(nested, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("allgather", {input}, {output},
               [&](Tensors& in, Tensors& out) { return inner_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return run("reduce_scatter", {input}, {output},
               [&](Tensors& in, Tensors& out) { return inner_->_reduce_scatter_base(out[0], in[0], options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(c10d::BarrierOptions{{}, options.timeout});
  }

 private:
  template <class Function>
  WorkPtr run(const char* name, const Tensors& inputs, const Tensors& outputs, Function collective) {
    sim::wait(stream_, record(current_stream()));
    launch(stream_);
    auto in = lend_to_host(name, inputs, false), out = lend_to_host(name, outputs, true);
    collective(in, out)->wait();
    auto work = c10::make_intrusive<SimWork>();
    work->event = record(stream_);
    work->outputs = outputs;
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  Tensors lend_to_host(const char* name, const Tensors& tensors, bool is_write) {
    Tensors aliases;
    for (auto& tensor : tensors) {
      touch(Region(tensor), stream_, is_write, name);
      use_on_stream(tensor, stream_);  // what the group works on is not handed out again
      aliases.push_back(alias_on_cpu(tensor));
    }
    return aliases;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  int stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& inner) {
  return c10::make_intrusive<SimBackend>(inner);
}

}  // namespace sim
