"""Schedules and scalers as plain values: with all they consist of, or refused by name."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from deadpool_plugin.adapters.deepspeed.state import check_schedule, load_plain_state, plain_state
from deadpool_plugin.errors import Unsupported
from deadpool_plugin.worker import codec


class Warmup(lr_scheduler.LRScheduler):
    """As people have it: hands over to another schedule, which is one of its attributes."""

    def __init__(self, optimizer, steps, after):
        self.steps, self.after_scheduler, self.finished = steps, after, False
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.last_epoch / self.steps for base in self.base_lrs]

    def step(self, epoch=None):
        if getattr(self, "last_epoch", -1) < self.steps:
            return super().step()
        self.after_scheduler.step()


class Halving:
    """A function with values of its own."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, step):
        self.factor /= 2
        return self.factor


SCHEDULES = {
    "in an attribute": lambda one: Warmup(one, 3, lr_scheduler.ExponentialLR(one, 0.5)),
    "a list": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.ExponentialLR(one, 0.5)], [3]
    ),
    "a Counter": lambda one: lr_scheduler.MultiStepLR(one, [2, 4]),
    "a list of dicts": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=20),
    "a partial function": lambda one: lr_scheduler.LambdaLR(one, functools.partial(lambda k, step: k / (step + 1), 2)),
    "an object for a function": lambda one: lr_scheduler.LambdaLR(one, Halving()),
    "a scale function": lambda one: lr_scheduler.CyclicLR(one, 0.1, 0.3, 2, mode="exp_range", cycle_momentum=False),
}


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def rates(schedule, steps):
    found = []
    for _ in range(steps):
        schedule.step()
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_from_where_it_was(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer has stepped
        ours, newcomers = (SCHEDULES[name](optimizer()) for _ in range(2))
        check_schedule(ours)
        rates(ours, 5)
        saved = codec.decode(codec.encode(plain_state(ours)))
        group = dict(ours.optimizer.param_groups[0])
        want = rates(ours, 4)
        for one in (ours, newcomers):
            load_plain_state(one, saved)
            one.optimizer.param_groups[0].update(lr=group["lr"], betas=group["betas"])
            assert rates(one, 4) == want
    assert all(type(value) is type(vars(newcomers)[name]) for name, value in vars(ours).items())


def test_what_is_noted_stays_as_it_is():
    schedule = lr_scheduler.MultiStepLR(optimizer(), [2, 4])
    saved = plain_state(schedule)
    schedule.milestones.clear()
    schedule.base_lrs.append(3)
    assert saved[0]["milestones"] == {2: 1, 4: 1} and saved[0]["base_lrs"] == [0.1]


def test_state_that_is_no_plain_data_is_refused_by_name():
    schedule: Any = lr_scheduler.StepLR(optimizer(), 3)
    schedule.peak = torch.ones(1)
    with pytest.raises(Unsupported, match="the schedule StepLR has the state 'peak', a Tensor"):
        check_schedule(schedule)
    with pytest.raises(Unsupported, match="'peak'"):
        check_schedule(Warmup(optimizer(), 3, schedule))
    schedule.state_dict = lambda: {"last_epoch": schedule.last_epoch}
    check_schedule(schedule)


def test_an_engine_without_a_schedule_has_no_state_of_one():
    check_schedule(None)
    load_plain_state(None, plain_state(None))
