"""The LightningModule: one optimizer step from one batch, whatever the objective."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MaxMetric, MeanMetric

from datamodules.types import OptimizerStep, RolloutBatch
from modules.by_mesh import clip_gradients, step_by_mesh
from modules.functional import masked
from modules.head_check import check_head
from modules.metrics.off_policy import OffPolicyMetrics
from modules.objectives.objective import Objective, ObjectiveOutput
from modules.policy import Policy


class PolicyModule(L.LightningModule):
    """Trains a policy with one objective head or a weighted sum of several.

    A batch is a whole optimizer step. Each head's unreduced loss is summed and divided by the step's global count of
    sequences, tokens or positives, so neither micro-batches nor ranks change the gradient. Optimization is manual, for
    the same reason: one item of the dataloader is one `optimizer.step()`.

    Args:
        policy: the model being trained.
        objectives: heads by name, at least one.
        optimizer: makes an optimizer from parameters.
        scheduler: makes a learning-rate schedule from `optimizer` and `num_training_steps`; stepped with it.
        max_grad_norm: gradients are scaled down to this norm, above 0; null leaves them.
        log_entropy: log the policy's entropy, at the price of one more pass through the output head.
        compile_layers: compile the decoder layers.
    """

    def __init__(
        self,
        policy: Policy,
        objectives: Mapping[str, Objective],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler],
        max_grad_norm: float | None,
        log_entropy: bool,
        compile_layers: bool,
    ) -> None:
        super().__init__()
        if not objectives:
            raise ValueError("objective: at least one head is needed, such as objective=topr")
        if max_grad_norm is not None and not max_grad_norm > 0.0:
            raise ValueError(f"policy_module.max_grad_norm must be above 0 or null, got {max_grad_norm}")
        self.automatic_optimization = False
        if compile_layers:
            policy.compile_layers()
        self.policy = policy
        self.objectives = nn.ModuleDict(dict(objectives))
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self.log_entropy = log_entropy
        self.off_policy = OffPolicyMetrics()
        self.step_metrics: dict[str, MeanMetric | MaxMetric] = {}
        self._is_sharded = False
        self._steps: list[tuple[float, float]] = []  # loss and gradient norm since they were last logged

    def setup(self, stage: str) -> None:
        """Check that the run provides what the heads need.

        Raises:
            ValueError: a tensor, siblings, one snapshot a step or unbiased log-probs are missing, or the precision
                hides the log-probs that train from the canary.
        """
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision must be 32-true, got {self.trainer.precision}: under autocast the log-probs that "
                "train are not those that the sync canary checks; use policy.dtype=bfloat16 instead"
            )
        for name, head in self.heads():
            check_head(name, head, self.trainer.datamodule)  # type: ignore[attr-defined]

    def heads(self) -> Iterable[tuple[str, Objective]]:
        """Return the heads with their names."""
        return self.objectives.items()  # type: ignore[return-value]

    def configure_model(self) -> None:
        """Shard the policy where the strategy does that."""
        if self._shards and not self._is_sharded:
            self.trainer.strategy.shard(self.policy)  # type: ignore[attr-defined]
            self._is_sharded = True

    @property
    def _shards(self) -> bool:
        return hasattr(self.trainer.strategy, "shard")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer, and the schedule over all optimizer steps that the config asks for.

        Raises:
            ValueError: the optimizer cannot work on shards.
        """
        optimizer = step_by_mesh(self.make_optimizer([p for p in self.policy.parameters() if p.requires_grad]))
        if self._shards and isinstance(optimizer, Adafactor):
            raise ValueError("optimizer=adafactor cannot step on the shards of trainer=fsdp; use adamw, or trainer=ddp")
        rounds = self.trainer.max_epochs or 0
        steps = self.trainer.datamodule.num_steps(rounds)  # type: ignore[attr-defined]
        return [optimizer], [self.make_scheduler(optimizer=optimizer, num_training_steps=steps)]

    def training_step(self, step: OptimizerStep, batch_idx: int) -> None:
        """Sum the gradients of the micro-batches, clip, step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad(set_to_none=True)
        *earlier, last = step.micro_batches or (None,)
        losses = []
        for batch in earlier:
            with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():  # reduced once, with the last
                losses.append(self._backward(batch))
        losses += [] if last is None else [self._backward(last)]
        loss = self._mean_over_ranks(sum(losses, torch.zeros((), device=self.device)))
        getattr(self.trainer.strategy, "average_copies", lambda _: None)(self.policy)
        norm = clip_gradients(self.policy.parameters(), self.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm.item()} at optimizer step {self.global_step}: lower optimizer.lr, or look "
                "at train/off_policy/log_ratio_max for ratios that exploded"
            )
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()
        self._log_step(loss, norm, scheduler.get_last_lr()[0])

    def _backward(self, batch: RolloutBatch) -> Tensor:
        """Add a micro-batch's gradient; return its share of the loss."""
        entropy = None
        if self.log_entropy:
            logprobs, entropy = self.policy.logprobs_and_entropy(batch)
        else:
            logprobs = self.policy.logprobs(batch)
        if not len(batch.rewards):  # this rank has nothing to train on, and keeps step with those that have
            self.manual_backward(logprobs.sum())
            return logprobs.sum().detach()
        if entropy is not None:
            self._update_metric("entropy", entropy[batch.completion_mask])
        outputs = {name: head(logprobs, batch) for name, head in self.heads()}
        loss = sum(self.reduce(head, outputs[name], batch) for name, head in self.heads())
        assert isinstance(loss, Tensor)
        self.manual_backward(loss)
        coefficients = sum(self.pull(head, outputs[name], batch) for name, head in self.heads())
        assert isinstance(coefficients, Tensor)
        if self.trainer.global_rank % self._tensor_parallel_size == 0:  # the others have the same numbers
            self.off_policy.update(logprobs.detach(), batch, coefficients, self.global_step)
        self._update_head_metrics(outputs)
        return loss.detach()

    def reduce(self, head: Objective, output: ObjectiveOutput, batch: RolloutBatch) -> Tensor:
        """Return a head's weighted share of the step's loss: local sum / global count x ranks with other samples.

        Their number undoes that distributed strategies average gradients over them.
        """
        count = getattr(batch, f"num_{head.normalizer}")
        return head.weight * output.loss.sum() / max(1, count) * self.num_shares

    @property
    def num_shares(self) -> int:
        """Ranks that have samples of their own; those that split layers between them see the same ones."""
        return self.trainer.world_size // self._tensor_parallel_size

    @property
    def _tensor_parallel_size(self) -> int:
        return getattr(self.trainer.strategy, "tensor_parallel_size", 1)

    @staticmethod
    def pull(head: Objective, output: ObjectiveOutput, batch: RolloutBatch) -> Tensor:
        """Return how hard a head's share of the step's loss pulls each log-prob up, negative for down, [B, C]."""
        c = output.coefficients if output.coefficients.dim() == 2 else output.coefficients[:, None]
        return head.weight / max(1, getattr(batch, f"num_{head.normalizer}")) * masked(c, batch.completion_mask)

    def _mean_over_ranks(self, value: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(value, reduce_op="sum")  # not every backend knows the mean
        return total / self.trainer.world_size  # type: ignore[operator]

    def _update_head_metrics(self, outputs: Mapping[str, ObjectiveOutput]) -> None:
        for name, output in outputs.items():
            for key, values in output.metrics.items():
                self._update_metric(f"{name}/{key}", values)

    def _update_metric(self, key: str, values: Tensor) -> None:
        if key not in self.step_metrics:
            self.step_metrics[key] = self._metric(key)
        self.step_metrics[key].update(values.detach())

    def _metric(self, key: str) -> MeanMetric | MaxMetric:
        kind = MaxMetric if key.endswith("_max") else MeanMetric
        return kind(nan_strategy="ignore").to(self.device)

    def _log_step(self, loss: Any, norm: Tensor, lr: float) -> None:
        """Every few steps and at the end of a round, log what all steps since the last time came to."""
        self.log("loss", float(loss), prog_bar=True, logger=False)
        self._steps.append((float(loss), float(norm)))
        if self.global_step % self.trainer.log_every_n_steps and not self.trainer.is_last_batch:  # type: ignore[attr-defined]
            return
        losses, norms = zip(*self._steps, strict=True)
        values = {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms), "lr": lr}
        values |= self.off_policy.compute() if self._agree_on_metrics() else {}
        values |= {key: float(metric.compute()) for key, metric in self.step_metrics.items()}
        self._steps.clear()
        self.off_policy.reset()
        self.step_metrics.clear()
        named = {f"train/{key}": value for key, value in values.items()}
        self.log_dict(named, logger=False)  # for callbacks
        for logger in self.loggers:  # Lightning itself would pass on every n-th step only, and lose a round's last ones
            logger.log_metrics(named, step=self.global_step)

    def _agree_on_metrics(self) -> bool:
        """Have the same metrics on all ranks, also on one that had nothing to train on: they add up together.

        Returns:
            Whether any rank trained on anything.
        """
        if self.trainer.world_size == 1:
            return self.off_policy.update_called
        keys: list[Any] = [None] * self.trainer.world_size
        dist.all_gather_object(keys, (self.off_policy.update_called, sorted(self.step_metrics)))
        for key in sorted({key for _, of_rank in keys for key in of_rank} - set(self.step_metrics)):
            self.step_metrics[key] = self._metric(key)
        self.step_metrics = {key: self.step_metrics[key] for key in sorted(self.step_metrics)}
        self.off_policy.take_part()
        return any(is_updated for is_updated, _ in keys)
