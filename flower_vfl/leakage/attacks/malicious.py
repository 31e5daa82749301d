"""Label inference attacks against vertical federated learning, the active attack.

Fu et al., USENIX Security 2022. A malicious passive party wants the shared model to
lean on its bottom model, whose outputs then say more about the labels. It follows the
protocol but takes larger steps: each entry of its update is scaled up while the entry
keeps its sign. Afterwards it runs :class:`~flower_vfl.leakage.attacks.ModelCompletion`.

What is scaled, g, is the direction of the step before the learning rate: with weight
decay and momentum in it (SGD), or after Adam's normalisation, which would undo a
scaling of the raw gradient. The released code does the same, but there the scaling
feeds back into the momentum buffer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flower_vfl.errors import ConfigError, require

OFFSET = 1e-7
LEAST_RATIO = 1.0


def amplification(
    current: Tensor, previous: Tensor, gamma: float = 1.0, max_ratio: float = 5.0
) -> Tensor:
    """Return clamp(1 + γ·g_t / (g_{t-1} + 1e-7), 1, max_ratio), entry by entry."""
    ratio = 1.0 + gamma * (current / (previous + OFFSET))
    # 0 / 0 happens where g_t is 0 and g_{t-1} is -1e-7: nothing to scale there.
    return ratio.nan_to_num(nan=LEAST_RATIO).clamp(LEAST_RATIO, max_ratio)


class _Malicious(Optimizer, ABC):
    """An optimizer that scales its own steps up."""

    def __init__(
        self, params: ParamsT, gamma: float, max_ratio: float, **settings: Any
    ) -> None:
        settings |= {"gamma": gamma, "max_ratio": max_ratio}
        for name, value in settings.items():
            least = LEAST_RATIO if name == "max_ratio" else 0.0
            if isinstance(value, float) and value < least:
                raise ConfigError(f"{name} must be at least {least:g}, got {value}")
        super().__init__(params, settings)

    @abstractmethod
    def direction(self, gradient: Tensor, state: Any, group: dict[str, Any]) -> Tensor:
        """Return an honest step, in a tensor that is none of the updated state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._descend(p, p.grad, group)
        return loss

    def _descend(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise ConfigError("sparse gradients cannot be scaled; set sparse=False")
        if group["weight_decay"]:
            gradient = gradient.add(p, alpha=group["weight_decay"])
        state = self.state[p]
        step = self.direction(gradient, state, group)
        if "scaled" in state:
            previous, gamma = state["scaled"], group["gamma"]
            step = step * amplification(step, previous, gamma, group["max_ratio"])
        state["scaled"] = step.clone()
        p.add_(step, alpha=-group["lr"])


class MaliciousSGD(_Malicious):
    """SGD whose steps are scaled up; takes the place of ``torch.optim.SGD``.

    Parameters
    ----------
    params : ParamsT
        Parameters or groups of them.
    lr : float (default: 1e-3)
        Learning rate.
    momentum : float (default: 0.0)
        Momentum.
    dampening : float (default: 0.0)
        Dampening of the momentum.
    weight_decay : float (default: 0.0)
        L2 penalty.
    nesterov : bool (default: False)
        Whether the momentum is Nesterov's.
    gamma : float (default: 1.0)
        Strength γ of the scaling; 0 is plain SGD.
    max_ratio : float (default: 5.0)
        Largest ratio of the scaling.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = MaliciousSGD([weight], lr=0.1, gamma=1.0)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> round(weight.item(), 3)  # plain SGD: 0.8
    0.7
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        gamma: float = 1.0,
        max_ratio: float = 5.0,
    ) -> None:
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise ConfigError("nesterov needs a momentum and no dampening")
        settings = {"lr": lr, "momentum": momentum, "dampening": dampening}
        settings |= {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, gamma, max_ratio, **settings)

    def direction(self, gradient: Tensor, state: Any, group: dict[str, Any]) -> Tensor:
        """Return the gradient with momentum."""
        momentum = group["momentum"]
        if not momentum:
            return gradient
        if "momentum_buffer" in state:
            buffer: Tensor = state["momentum_buffer"]
            buffer.mul_(momentum).add_(gradient, alpha=1.0 - group["dampening"])
        else:
            buffer = state["momentum_buffer"] = gradient.clone()
        if group["nesterov"]:
            return gradient.add(buffer, alpha=momentum)
        return buffer.clone()


class MaliciousAdam(_Malicious):
    """Adam whose steps are scaled up; takes the place of ``torch.optim.Adam``.

    Parameters
    ----------
    params, lr, weight_decay, gamma, max_ratio
        As for :class:`MaliciousSGD`; with γ = 0 it is plain Adam.
    betas : tuple[float, float] (default: (0.9, 0.999))
        Decay of the running means of the gradient and of its square.
    eps : float (default: 1e-8)
        Added to the denominator.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = MaliciousAdam([weight], lr=0.1, gamma=1.0)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> round(weight.item(), 3)  # plain Adam: 0.8
    0.7
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 1.0,
        max_ratio: float = 5.0,
    ) -> None:
        possible = all(0.0 <= beta < 1.0 for beta in betas)
        require(possible, "betas", "at least 0 and below 1", betas)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, gamma, max_ratio, **settings)

    def direction(self, gradient: Tensor, state: Any, group: dict[str, Any]) -> Tensor:
        """Return the corrected mean gradient over the root of the mean square."""
        betas: tuple[float, float] = group["betas"]
        first, second = betas
        if "step" not in state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        count: int = state["step"]
        mean: Tensor = state["exp_avg"].lerp_(gradient, 1.0 - first)
        square: Tensor = state["exp_avg_sq"].mul_(second)
        square.addcmul_(gradient, gradient, value=1.0 - second)
        root = (square / (1.0 - second**count)).sqrt_()
        return mean / (1.0 - first**count) / root.add_(group["eps"])
