// Arithmetic for the stand-in for CUDA: an extension of torch that gives every operation of torch's CUDA key a kernel.
//
// Answers: what torch's CPU kernel answers for the same memory, computed on the thread of the current stream. The host
// goes on at once where the form of the result is known before (torch's own meta kernel tells it); where it depends on
// data (nonzero, masked_select), the host waits for the stream, as it does for a device. Errors that a device finds (an
// index out of bounds, _assert_async) kill the context; those that torch finds before a launch are raised.
// A kernel keeps no tensor alive: as on a device, only the allocator's rules keep memory from being given away.
// Random numbers follow the CUDA generator's seed and offset, which advances by 4 with each operation: the same state
// gives the same numbers, but not a card's.
// Cannot: operations that have no CPU kernel (cuDNN's convolutions, flash attention; attention takes its math path).
// torch's kernel stays there, and its launch is refused (device.cpp). Rounding is the CPU's, never a card's.
//
// FAKECUDA_TRACE=1 names on stderr, once, each operation that waits for its result's form.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/copy_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <unordered_map>
#include <unordered_set>

#include "fakecuda.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Operations of torch that need no kernel, or are made of others; so do views, which their schema tells.
const std::unordered_set<std::string> LEFT_TO_TORCH = {
    "aten::empty", "aten::empty_strided", "aten::empty_quantized", "aten::set_", "aten::resize_", "aten::is_set_to",
    "aten::is_pinned", "aten::_pin_memory", "aten::record_stream", "aten::_local_scalar_dense",
    "aten::_efficientzerotensor", "aten::_cudnn_init_dropout_state", "aten::_has_compatible_shallow_copy_type",
};

const bool tracing = getenv("FAKECUDA_TRACE");

template <class Map>
IValue mapped(const IValue& value, Map map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& one : value.toTensorVector()) list.push_back(map(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& one : value.toOptionalTensorVector())
      list.push_back(one ? std::optional<Tensor>(map(*one)) : std::nullopt);
    return list;
  }
  return value;
}

// The memory of a tensor of the device as a tensor of the CPU. It owns nothing: as a kernel, it has an address.
Tensor twin_of(const Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  auto twin = tensor.numel() ? at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options)
                             : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  twin._set_conj(tensor.is_conj());
  twin._set_neg(tensor.is_neg());
  return twin;
}

Tensor form_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto form = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory({}));
  form._set_conj(tensor.is_conj());
  form._set_neg(tensor.is_neg());
  return form;
}

// A tensor of the CPU that a kernel will read later: the caller may change or free his.
Tensor kept(const Tensor& tensor) {
  auto copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Memory for a result, without the fill of torch.use_deterministic_algorithms: it would be enqueued behind the result.
Tensor room_for(const Tensor& form, c10::Device device, std::optional<at::ScalarType> type = {}) {
  if (!form.defined()) return form;
  return at::detail::empty_strided_cuda(form.sizes(), form.strides(), type.value_or(form.scalar_type()), device);
}

// A generator that depends on the state of the device's, which moves on.
at::Generator next_generator(std::optional<at::Generator> given, c10::Device device) {
  auto generator = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard<std::mutex> guard(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  auto made = at::globalContext().defaultGenerator(at::kCPU).clone();
  uint64_t mixed = generator.current_seed() * 0x9e3779b97f4a7c15 + offset * 0xbf58476d1ce4e5b9;
  made.set_current_seed(mixed ^ (mixed >> 31));
  return made;
}

// torch's own meta kernels, which tell an operation's form without doing it (see site/sitecustomize.py).
std::unordered_map<c10::OperatorName, c10::SafeKernelFunction>& own_forms() {
  static auto* all = new std::unordered_map<c10::OperatorName, c10::SafeKernelFunction>;
  return *all;
}

// What is done on the stream's thread.
void enqueue(c10::Device device, std::string name, std::function<void()> kernel) {
  C10_CUDA_CHECK(static_cast<cudaError_t>(fakecuda_broken()));
  struct Task {
    std::string name;
    std::function<void()> kernel;
  };
  auto run = [](void* argument) {
    std::unique_ptr<Task> task(static_cast<Task*>(argument));
    if (fakecuda_broken()) return;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      task->kernel();
    } catch (const std::exception& error) {
      fprintf(stderr, "[fakecuda] %s failed on the device: %s\n", task->name.c_str(), error.what());
      fakecuda_break(cudaErrorAssert);
    }
  };
  auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  fakecuda_enqueue(stream.stream(), run, new Task{std::move(name), std::move(kernel)});
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after every launch: also raises what an earlier call has left
}

struct Operation : c10::OperatorKernel {
  explicit Operation(const c10::OperatorHandle& op) : op_(op) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = arguments[i].alias_info();
      if (alias && alias->isWrite()) written_.push_back(i);
      if (arguments[i].is_out()) outs_.push_back(i);
      if (arguments[i].type()->str().find("Generator") != std::string::npos) generator_ = static_cast<int>(i);
    }
    for (const auto& result : op.schema().returns()) {
      const auto* alias = result.alias_info();
      int source = -1;
      for (size_t i : written_)
        if (alias && arguments[i].alias_info()->beforeSets() == alias->beforeSets()) source = static_cast<int>(i);
      sources_.push_back(source);
      is_new_ |= source < 0;
    }
    auto found = own_forms().find(op.operator_name());
    if (found != own_forms().end()) tells_form_ = &found->second;
  }

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    Stack arguments(stack->end() - static_cast<long>(op_.schema().arguments().size()), stack->end());
    auto device = device_of(arguments);
    c10::cuda::CUDAGuard guard(device);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stack forms;
    Stack results = tell_forms(arguments, forms) ? later(arguments, forms, device) : now(arguments, device);
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), results.begin(), results.end());
  }

 private:
  c10::OperatorHandle op_;
  std::vector<size_t> written_, outs_;
  std::vector<int> sources_;  // of each result: the argument that it is, or -1
  bool is_new_ = false;       // a result is not an argument
  int generator_ = -1;
  const c10::SafeKernelFunction* tells_form_ = nullptr;

  c10::Device device_of(const Stack& arguments) const {
    std::optional<c10::Device> found;
    auto look = [&](const Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
      return tensor;
    };
    for (const auto& argument : arguments) {
      mapped(argument, look);
      if (!found && argument.isDevice() && argument.toDevice().is_cuda()) found = argument.toDevice();
    }
    if (!found || !found->has_index()) return {at::kCUDA, c10::cuda::current_device()};
    return *found;
  }

  // Runs the meta kernel; `forms` is what it gives, with the forms of the arguments before. False if it cannot tell.
  bool tell_forms(const Stack& arguments, Stack& forms) const {
    bool writes_to_host = false;
    for (size_t i : written_)
      mapped(arguments[i], [&](const Tensor& tensor) {
        writes_to_host |= tensor.defined() && !tensor.is_cuda();
        return tensor;
      });
    if (writes_to_host) return false;
    if (!tells_form_) return outs_.empty() && (!is_new_ || known_forms(arguments, forms));
    for (const auto& argument : arguments) {
      if (argument.isDevice()) forms.emplace_back(c10::Device(at::kMeta));
      else if (argument.isGenerator()) forms.emplace_back();
      else forms.push_back(mapped(argument, form_of));
    }
    Stack results = forms;
    try {
      tells_form_->callBoxed(op_, c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    } catch (const c10::Error& error) {  // if it is the caller's mistake, the CPU's kernel raises it
      if (tracing) fprintf(stderr, "[fakecuda] %s\n", error.what_without_backtrace());
      return false;
    }
    std::unordered_set<const void*> given;
    for (const auto& form : forms)
      mapped(form, [&](const Tensor& tensor) { return given.insert(tensor.unsafeGetTensorImpl()), tensor; });
    for (size_t i = 0; i < results.size(); i++) {
      if (sources_[i] >= 0) continue;
      if (!results[i].isTensor() && !results[i].isTensorList()) return false;
      bool is_new = true;
      mapped(results[i], [&](const Tensor& tensor) {
        is_new &= !tensor.defined() || (tensor.is_meta() && !given.count(tensor.unsafeGetTensorImpl()));
        return tensor;
      });
      if (!is_new) return false;
    }
    forms.insert(forms.end(), results.begin(), results.end());
    return true;
  }

  // The forms of frequent operations that torch has no meta kernel of its own for. False if this is none of them.
  bool known_forms(const Stack& arguments, Stack& forms) const {
    const auto& name = op_.operator_name().name;
    auto like = [](const Tensor& tensor) {
      return at::empty(tensor.sizes(), tensor.options().device(at::kMeta).pinned_memory({}));
    };
    forms = arguments;  // nobody looks at those
    if (name == "aten::native_layer_norm") {
      const auto& input = arguments[0].toTensor();
      auto weight = arguments[2].toOptional<Tensor>();
      bool is_mixed = weight && weight->defined() && weight->scalar_type() != input.scalar_type();
      auto sizes = input.sizes().vec();
      std::fill(sizes.end() - static_cast<long>(arguments[1].toIntVector().size()), sizes.end(), 1);
      auto form = at::empty(sizes, like(input).options().dtype(is_mixed ? at::kFloat : input.scalar_type()));
      forms.insert(forms.end(), {like(input), form, form});
    } else if (name == "aten::native_layer_norm_backward") {
      const auto wanted = arguments[7].toBoolList();
      for (size_t i : {1, 5, 6}) {
        auto of = arguments[i].toOptional<Tensor>();
        forms.emplace_back(wanted[i == 1 ? 0 : i - 4] && of && of->defined() ? like(*of) : Tensor());
      }
    } else if (name == "aten::native_dropout_backward") {
      forms.emplace_back(like(arguments[0].toTensor()));
    } else if ((name == "aten::max" || name == "aten::min") && arguments.size() == 1) {
      forms.emplace_back(at::empty({}, like(arguments[0].toTensor()).options()));
    } else if (name.rfind("aten::_foreach_", 0) == 0 && name != "aten::_foreach_norm" && name != "aten::_foreach_max") {
      bool is_simple = true;
      forms.push_back(mapped(arguments[0], [&](const Tensor& tensor) {
        is_simple &= tensor.is_contiguous() && tensor.is_floating_point();
        return like(tensor);
      }));
      return is_simple && arguments[0].isTensorList() && sources_.size() == 1;
    } else {
      return false;
    }
    return true;
  }

  // Arguments of the CPU's kernel. `keep`: host memory is copied, for it is read later.
  Stack of_cpu(const Stack& arguments, c10::Device device, bool keep,
               std::unordered_map<const void*, Tensor>& twins) const {
    Stack made;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (static_cast<int>(i) == generator_) {
        made.emplace_back(next_generator(arguments[i].toOptional<at::Generator>(), device));
      } else if (arguments[i].isDevice()) {
        made.emplace_back(c10::Device(at::kCPU));
      } else {
        made.push_back(mapped(arguments[i], [&](const Tensor& tensor) {
          if (!tensor.defined() || (!tensor.is_cuda() && !keep)) return tensor;
          auto& twin = twins[tensor.unsafeGetTensorImpl()];
          if (!twin.defined()) twin = tensor.is_cuda() ? twin_of(tensor) : kept(tensor);
          return twin;
        }));
      }
    }
    return made;
  }

  Stack later(const Stack& arguments, const Stack& forms, c10::Device device) const {
    for (size_t i : outs_) {
      const auto& out = arguments[i].toTensor();
      const auto& form = forms[i].toTensor();
      if (out.sizes() != form.sizes()) out.resize_(form.sizes());
      if (out.strides() != form.strides()) out.as_strided_(form.sizes(), form.strides());
    }
    Stack results;
    std::vector<std::vector<Tensor>> targets;
    for (size_t i = 0; i < sources_.size(); i++) {
      std::vector<Tensor> target;
      if (sources_[i] >= 0) {
        results.push_back(arguments[sources_[i]]);
      } else {
        results.push_back(mapped(forms[arguments.size() + i], [&](const Tensor& form) {
          auto room = room_for(form, device);
          target.push_back(room.defined() ? twin_of(room) : room);
          return room;
        }));
      }
      targets.push_back(std::move(target));
    }
    std::unordered_map<const void*, Tensor> twins;
    enqueue(device, op_.schema().name(),
            [op = op_, stack = of_cpu(arguments, device, true, twins), targets = std::move(targets)]() mutable {
              op.callBoxed(stack);
              for (size_t i = 0; i < targets.size(); i++) {
                size_t next = 0;
                if (!targets[i].empty())
                  mapped(stack[i], [&](const Tensor& result) {
                    auto& target = targets[i][next++];
                    if (target.defined() && result.defined()) target.copy_(result);
                    return result;
                  });
              }
            });
    return results;
  }

  Stack now(const Stack& arguments, c10::Device device) const {
    if (tracing) {
      static std::mutex lock;
      static auto* said = new std::unordered_set<std::string>;
      std::lock_guard<std::mutex> guard(lock);
      auto name = toString(op_.operator_name());
      if (said->insert(name).second) fprintf(stderr, "[fakecuda] waits for its form: %s\n", name.c_str());
    }
    C10_CUDA_CHECK(static_cast<cudaError_t>(fakecuda_wait(c10::cuda::getCurrentCUDAStream(device.index()).stream())));
    std::unordered_map<const void*, Tensor> twins;
    Stack stack = of_cpu(arguments, device, false, twins);
    for (size_t i : outs_) {  // of a size that only the kernel knows
      const auto& out = arguments[i].toTensor();
      if (out.is_cuda()) stack[i] = at::empty_strided({0}, {1}, out.options().device(at::kCPU));
    }
    op_.callBoxed(stack);
    auto put = [](const Tensor& room, const Tensor& value) {
      if (value.defined() && value.numel()) twin_of(room).copy_(value);
      return room;
    };
    for (size_t i = 0; i < sources_.size(); i++) {
      bool is_out = std::find(outs_.begin(), outs_.end(), sources_[i]) != outs_.end();
      if (is_out && arguments[sources_[i]].toTensor().is_cuda()) {
        const auto& out = arguments[sources_[i]].toTensor();
        const auto& value = stack[i].toTensor();
        if (out.sizes() != value.sizes()) {
          out.resize_(value.sizes());
          fakecuda_wait(c10::cuda::getCurrentCUDAStream(device.index()).stream());  // for its fill, or its copy
        }
        put(out, value);
      }
      if (sources_[i] >= 0) {
        stack[i] = arguments[sources_[i]];
      } else {
        stack[i] = mapped(stack[i], [&](const Tensor& value) {
          return value.defined() ? put(room_for(value, device), value) : value;
        });
      }
    }
    return stack;
  }
};

// Copies that are one cudaMemcpyAsync for torch, or are made of other copies, are left to it.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  bool is_alike = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                  self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                  self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (is_alike || !self.is_cuda() || !source.is_cuda())
    return at::compositeexplicitautograd::copy_(self, source, non_blocking);
  auto expanded = source.expand(self.sizes());
  c10::cuda::CUDAGuard guard(source.device());
  if (self.numel())
    enqueue(source.device(), "aten::copy_",
            [to = twin_of(self), from = twin_of(expanded)]() mutable { to.copy_(from); });
  return self;
}

// torch's own CPU kernel draws from the CPU's default generator, which a device does not touch.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto device = input.device();
  c10::cuda::CUDAGuard guard(device);
  Tensor result = room_for(input, device), mask = room_for(input, device, at::kBool);
  bool drops = !train || *train;
  std::optional<at::Generator> generator;
  if (drops) generator = next_generator({}, device);
  enqueue(device, "aten::native_dropout",
          [from = twin_of(input), to = twin_of(result), keeps = twin_of(mask), p, generator]() mutable {
            if (generator) keeps.bernoulli_(1 - p, generator);
            else keeps.fill_(true);
            to.copy_(from.mul(keeps).mul_(generator && p < 1 ? 1 / (1 - p) : 1.0));
          });
  return {result, mask};
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // that kernels are overridden
};

}  // namespace

extern "C" void fakecuda_remember_forms() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    if (op.hasKernelForDispatchKey(c10::DispatchKey::Meta))
      own_forms().emplace(name, op.getComputedKernelForDispatchKey(c10::DispatchKey::Meta));
  }
}

extern "C" void fakecuda_install() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0 || LEFT_TO_TORCH.count(name.name)) continue;
    auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    bool is_view = false;
    for (const auto& result : op.schema().returns())
      is_view |= result.alias_info() && !result.alias_info()->isWrite();
    if (is_view || name.name == "aten::native_dropout") continue;
    library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Operation>(op)));
  }
  library->impl("aten::copy_", &copy);
  library->impl("aten::native_dropout", &dropout);
  at::globalContext().setSDPUseFlash(false);  // of attention's kernels, the CPU has the one that is made of operations
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}
