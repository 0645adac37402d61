"""The cut through the graph: gradients are those without it, and the engine's side can be gone through again."""

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from support import present
from support.stand_in import fake
from torch.utils import _pytree as pytree

from deadpool_plugin.adapters.deepspeed import cut as cut_module, outputs
from deadpool_plugin.adapters.deepspeed.calls import Backward, EngineCalls, Forward
from deadpool_plugin.adapters.deepspeed.cut import Graph, ScriptsPart, collect, cut, is_collecting, seed
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker.copies import COPIED_BYTES_MAX, Inputs


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def training_calls(handler=lambda *call: None):
    """EngineCalls of an engine that has no parameter."""
    calls = EngineCalls(handler)
    calls.state, calls.is_training = fake(has_parameter=lambda leaf: False), True
    return calls


def script(output):
    return (output.exp() * output).mean() + output.pow(3).sum()


def test_gradients_behind_a_cut_are_those_without_one():
    plain, ours, data = model(), model(), torch.linspace(-1, 1, 12).view(3, 4)
    script(plain(data)).backward()
    output = ours(data)
    graph = Graph(0, [output])
    (given,) = cut(graph, [output])
    parts = collect(lambda: script(given).backward())
    assert all(parameter.grad is None for parameter in ours.parameters())
    for _ in range(2):  # a redo: the engine's forward again, its backward with the same gradients
        graph.outputs = [ours(data)]
        for parameter in ours.parameters():
            parameter.grad = None
        seed(parts).backward()
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("in_hooks", [False, True], ids=["0.19", "0.18.9"])
def test_gradients_are_divided_by_the_micro_batches_once(in_hooks):
    """By the loss, or by hooks that the engine has put on its outputs."""
    plain, ours, data = model(), model(), torch.linspace(-1, 1, 12).view(3, 4)
    (script(plain(data)) / 2).backward()

    def forward(engine, batch):
        output = ours(batch)
        if in_hooks:
            output.register_hook(lambda gradient: gradient / 2)
        return output

    engine = fake(global_steps=0, optimizer=None, gradient_accumulation_steps=lambda: 2)
    if in_hooks:
        engine._scale_wrt_gas = True
    calls = training_calls()
    loss = script(Forward(calls, "forward", forward, engine, data)())
    value = Backward(calls, "backward", lambda engine, loss, **_: loss.backward(), engine, loss, False, True)()
    assert torch.equal(value, loss / 2)
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def whole_model(ours):
    """An engine whose forward gives a dict with the loss, and calls for it."""
    engine = fake(global_steps=0, optimizer=None, gradient_accumulation_steps=lambda: 2)
    calls = training_calls()

    def forward(engine, batch):
        output = ours(batch)
        return {"logits": output, "loss": script(output)}

    return engine, calls, forward


def engines_own(engine, loss, retain_graph, **_):
    loss = loss / 2
    loss.backward(retain_graph=retain_graph)
    return loss


def test_a_loss_of_the_engines_forward_goes_through_its_backward_as_without_us():
    """No kernel more than without, and a redo goes through the output that is computed again."""
    ours, data, given = model(), torch.linspace(-1, 1, 12).view(3, 4), []
    engine, calls, forward_of = whole_model(ours)
    forward = Forward(calls, "forward", forward_of, engine, data)
    value, gradients = forward(), []

    def original(engine, loss, **options):
        given.append(loss)
        return engines_own(engine, loss, **options)

    backward = Backward(calls, "backward", original, engine, value["loss"], False, True)
    for _ in range(2):
        ours.zero_grad()
        returned = backward()
        assert torch.equal(returned, value["loss"] / 2) and not returned.requires_grad
        gradients.append([parameter.grad for parameter in ours.parameters()])
        assert calls.loss is not None and calls.loss.item() == value["loss"].item()
        forward()
    assert all(map(torch.equal, *gradients)) and all(gradient.any() for gradient in gradients[0])
    assert [type(loss.grad_fn).__name__ for loss in given] == ["AddBackward0"] * 2, "the engine's own outputs"
    assert given[0] is not given[1] and backward._output is not None


def test_a_loss_that_is_hooked_or_taken_twice_goes_through_the_scripts_part():
    ours, data, seen = model(), torch.linspace(-1, 1, 12).view(3, 4), []
    engine, calls, forward = whole_model(ours)
    loss = Forward(calls, "forward", forward, engine, data)()["loss"]
    loss.register_hook(lambda gradient: seen.append(gradient.item()))
    Backward(calls, "backward", engines_own, engine, loss, False, True)()
    assert seen == [0.5]
    loss = Forward(calls, "forward", forward, engine, data)()["loss"]
    for retain in (True, False):
        Backward(calls, "backward", engines_own, engine, loss, retain, True)()
    with pytest.raises(RuntimeError, match="retain_graph"):
        Backward(calls, "backward", engines_own, engine, loss, False, True)()


def test_a_loss_of_an_earlier_steps_forward_is_refused():
    engine, calls, forward = whole_model(model())
    loss = Forward(calls, "forward", forward, engine, torch.ones(3, 4))()["loss"]
    engine.global_steps = 1
    for given in (loss, loss * 1):
        with pytest.raises(Unsupported, match="does not come from this step's"):
            Backward(calls, "backward", engines_own, engine, given, False, True)()


def test_calls_done_again_before_the_script_got_their_values_have_them_again():
    ours, data = model(), torch.linspace(-1, 1, 12).view(3, 4)
    engine = fake(global_steps=0, optimizer=None, gradient_accumulation_steps=lambda: 2)
    calls = training_calls()
    forward = Forward(calls, "forward", lambda engine, batch: ours(batch), engine, data)
    backward: Backward | None = None
    gradients = []
    for _ in range(2):
        output = forward()
        if backward is None:
            backward = Backward(
                calls, "backward", lambda engine, loss, **_: loss.backward(), engine, script(output), False, True
            )
        ours.zero_grad()
        value = backward()
        assert value.item() == (script(output) / 2).item()
        gradients.append([parameter.grad for parameter in ours.parameters()])
    assert all(map(torch.equal, *gradients)) and all(gradient.any() for gradient in gradients[0])
    assert backward is not None
    backward.outcome(value)
    forward()
    assert backward() is None


def test_large_gradients_wait_for_a_redo_in_host_memory(monkeypatch):
    ours, data, moved = model(), torch.linspace(-1, 1, 12).view(3, 4), []
    monkeypatch.setattr(cut_module, "_is_far", lambda gradient: gradient.numel() == 6)
    monkeypatch.setattr(cut_module, "_in_host_memory", lambda gradient: moved.append(gradient) or gradient.clone())
    engine = fake(global_steps=0, optimizer=None, gradient_accumulation_steps=lambda: 1)
    calls = training_calls()
    forward = Forward(calls, "forward", lambda engine, batch: ours(batch), engine, data)
    backward = Backward(
        calls, "backward", lambda engine, loss, **_: loss.backward(), engine, script(forward()), False, True
    )
    backward()
    first = [parameter.grad.clone() for parameter in ours.parameters()]
    ((_, (kept_gradient,)),) = backward._parts
    assert len(moved) == 1 and kept_gradient is not moved[0] and torch.equal(present(kept_gradient), moved[0])
    moved[0].zero_()
    ours.zero_grad()
    forward(), backward()
    assert all(map(torch.equal, first, [parameter.grad for parameter in ours.parameters()]))


def test_small_gradients_and_those_of_a_cpu_stay_where_they_are():
    assert not cut_module._is_far(torch.zeros(1 << 20))
    assert cut_module._is_far(torch.zeros(1 << 18, device="meta"))
    assert not cut_module._is_far(torch.zeros(1 << 17, device="meta"))


def test_a_graph_is_used_up_once():
    graph = Graph(0, None)
    with pytest.raises(RuntimeError, match="retain_graph"):
        seed([(graph, [torch.ones(1)])])


def behind_cut(output):
    (given,) = cut(Graph(0, [output]), [output])
    return given


def test_a_backward_of_the_scripts_own_that_failed_leaves_nothing_to_the_next(monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back afterwards
    handled: list[Any] = []
    calls = training_calls(handled.append)
    calls._wrap_backward()

    def given():
        output = torch.nn.Parameter(torch.ones(3)) * 2
        return cut(Graph(0, [output]), [output])[0]

    def fail(gradient):
        raise ArithmeticError

    later = given() * 1
    later.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (given().sum() + later.sum()).backward()
    assert not is_collecting() and not handled
    given().sum().backward()
    assert len(handled[0].function.args[0]) == 1


class OnDevice(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_a_backward_of_the_scripts_own_on_a_gpu_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back afterwards
    training_calls()._wrap_backward()
    own: Any = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(Unsupported, match=r"expected engine\.backward\(loss\)"):
        (behind_cut(own * 2).sum() + own.sum()).as_subclass(OnDevice).backward()
    assert own.grad is None
    own.sum().as_subclass(OnDevice).backward()
    gradient: Any = own.grad
    assert gradient.tolist() == [1.0] * 3


def test_a_loss_that_a_redo_would_leave_out_is_refused():
    inner, own = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    given = behind_cut(inner * 2)
    whole = ScriptsPart([(given * 3).sum()])
    assert whole.reaches_cut and not whole.leaves
    whole.check(lambda leaf: False)
    with pytest.raises(Unsupported, match="the engine's model"):
        ScriptsPart([(given * own).sum()]).check(lambda leaf: leaf is own)
    with pytest.raises(Unsupported, match="the script's own"):
        ScriptsPart([(given * own).sum()]).check(lambda leaf: False)
    assert not ScriptsPart([(own * 2).sum()]).reaches_cut


def test_communication_in_the_scripts_part_is_refused(tmp_path):
    given = behind_cut(torch.nn.Parameter(torch.ones(3)) * 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        gathered = torch.stack(torch.distributed.nn.all_gather(given)).sum()
    finally:
        dist.destroy_process_group()
    with pytest.raises(Unsupported, match="torch.distributed"):
        ScriptsPart([gathered]).check(lambda leaf: False)


def test_inputs_made_in_inference_mode_are_kept():
    with torch.inference_mode():
        small, large = torch.ones(2), torch.ones(COPIED_BYTES_MAX)
        inputs = Inputs((small, large), {}, "the engine's forward")
    args, _ = inputs.again()
    assert torch.equal(args[0], small) and args[1] is large


def test_outputs_that_followers_could_not_be_told_are_refused():
    Pair = collections.namedtuple("Pair", "loss logits")
    for value in (Pair(torch.ones(1), torch.ones(2)), {"made": fake(loss=torch.ones(1)), "rest": None}):
        with pytest.raises(Unsupported, match="return a dict"):
            outputs.encode(value)


def test_what_followers_are_told():
    loss = torch.tensor(2.5, requires_grad=True) * 1
    logits = torch.zeros(outputs.TOLD_BYTES_MAX, requires_grad=True) + 1
    value = {"loss": loss, "rest": (torch.arange(3), None, 7), "logits": logits}
    heard = outputs.decode(outputs.encode(value), torch.device("cpu"))
    assert heard["loss"].item() == 2.5 and torch.equal(heard["rest"][0], torch.arange(3))
    assert heard["rest"][1:] == (None, 7)
    assert heard["logits"].shape == logits.shape and not heard["logits"].any()
    assert {id(one) for one in outputs.differentiable(heard)} == {id(heard["loss"]), id(heard["logits"])}
    assert pytree.tree_structure(heard) == pytree.tree_structure(value)


def test_a_model_may_call_its_arguments_as_it_likes():
    engine = fake(global_steps=0)
    forward = Forward(training_calls(), "forward", lambda engine, **batch: batch, engine, calls=1, original=2)
    assert forward() == {"calls": 1, "original": 2}


def test_calls_have_the_names_of_the_engines_methods_and_the_kinds_they_are(monkeypatch):
    """DeepSpeed's decorators leave another name on a function."""

    class Engine:
        data_iterator = iter([7])

        def method(self, *args, **kwargs):
            return args

        forward = backward = step = zero_grad = allreduce_gradients = _take_model_step = method
        train_batch = eval_batch = method

        def is_gradient_accumulation_boundary(self):
            return True

    for name in ("_wrap_backward", "_wrap_reads", "_wrap_monitors"):
        monkeypatch.setattr(EngineCalls, name, lambda calls: None)
    made: list[Any] = []
    calls = training_calls(lambda call: made.append((call.name, call.kind.value)) or call())
    calls.install(Engine, Engine)
    engine: Any = Engine()
    engine.step(), engine.zero_grad(), engine.allreduce_gradients()
    assert engine.train_batch() == (engine.data_iterator,) and engine.eval_batch("data", 3) == ("data", 3)
    assert made == [
        ("engine.step", "update"), ("engine.zero_grad", "plain"), ("engine.allreduce_gradients", "plain"),
        ("engine.train_batch", "step"), ("engine.eval_batch", "forward"),
    ]  # fmt: skip
