"""The training loop of one rank: set-up, resume, training, evaluation, checkpoints. No step waits for the device:
losses are read from it only when they are logged. ``trainers.training.session`` calls it."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import Tensor

from trainers.checkpoint import Checkpoint, CheckpointFolder, Identity
from trainers.contract import run_folder
from trainers.contract.beats import Phase
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.data.augment import EpochPlan, normaliser, plan_epoch
from trainers.data.pack import MappedPack, PackWatch, set_aside
from trainers.data.randomness import key
from trainers.data.step_plan import plan_steps
from trainers.distributed import rank_state
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.node_hardware import hardware_of_nodes
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import read_attempt
from trainers.distributed.resources import resume_garbage_collection
from trainers.distributed.termination import Termination
from trainers.training import initial_weights, loss, operators
from trainers.training.digests import Digests
from trainers.training.evaluation import Evaluation, Evaluator
from trainers.training.loss import Losses, Reading
from trainers.training.model_setup import agree_on_precision, calibrate, choose_kernels, freeze, make_network
from trainers.training.progress import MetricsFile, Progress, Throughput
from trainers.training.step import Stepper


class Trainer:
    """Trains on one rank. Call ``prepare()``, then ``train()``, then ``test()``. Files are written by rank 0 alone,
    where ``folder`` (checkpoints) and ``metrics`` (metrics.jsonl) are set.
    """

    def __init__(self, config: TrainConfig, pack: MappedPack, context: RankContext, run_dir: Path) -> None:
        self.config, self.pack, self.context, self.run_dir = config, pack, context, run_dir
        self.attempt = read_attempt(run_dir)
        choose_kernels(deterministic=config.trainer.deterministic)
        self.steps = plan_steps(config.trainer, pack.manifest, context.ranks.world_size)
        self.model = make_network(config, pack.manifest, context, self.steps)
        self.normalise = normaliser(pack.manifest, normalise=config.dataset.normalise, device=context.device)
        calibrate(self.model, pack, self.normalise)
        self.initial = initial_weights.load(config, self.model, context, run_dir, pack.manifest.num_classes)
        freeze(self.model, config.trainer.freeze)
        self.precision = agree_on_precision(config.trainer.precision, context)
        self.stepper = Stepper(
            config, pack, context, self.model, steps=self.steps, normalise=self.normalise, precision=self.precision
        )
        self.more_metrics = loss.metrics(config.trainer, pack.manifest.num_classes, context.device)
        self.step, self.progress = 0, Progress()
        capacity = min(config.trainer.log_every_steps, self.steps.per_epoch)
        self.losses = Losses(context, capacity, self.steps.parts_per_rank)
        self.throughput = Throughput(self.steps.global_batch_size)
        every = config.trainer.digests
        self.digests = Digests(self.model, context, run_dir / run_folder.DIGESTS, every) if every else None
        self.replay = operators.requested_replay()  # of a few steps, for `doit diff`; None in a run
        self.saved_step = 0
        self.watch: PackWatch | None = None  # detects changes of this node's data files
        self.pruned = False  # the controller ended the run early, at the end of an epoch
        self._saved_at = time.monotonic()
        self.metrics: MetricsFile | None = None
        self.folder: CheckpointFolder | None = None

    # ----------------------------------------------------------------------------- start and resume
    def prepare(self) -> None:
        """Warm up, then load the newest good checkpoint, which rank 0 broadcasts, or else share fresh weights."""
        resume_garbage_collection()
        warm_up_s = self._warm_up()
        own_row = self.stepper.own_row()  # the state that each rank has for itself, as a row
        self.nodes = hardware_of_nodes(self.context)
        resumed: Checkpoint | None = None
        table: Tensor | None = None
        if self.context.is_rank_zero:
            resumed = self._resume()
            table = self._rows_of_ranks(own_row, resumed)
        self._broadcast_position()
        self.context.broadcast(self.stepper.replicated_tensors())
        self.stepper.scatter_rows(table, own_row)
        if self.step:  # with fsdp, each rank gets its slices of the checkpoint
            self.stepper.distribute(resumed)
        if self.digests is not None:
            self.digests.begin(self.step)
        self.progress.warm_up_s += warm_up_s

    def _resume(self) -> Checkpoint | None:
        """Load the newest good checkpoint on rank 0, if there is one, and open the files that rank 0 writes."""
        owner = Identity.of(
            self.config,
            self.pack.manifest.digest,
            world_size=self.context.ranks.world_size,
            hardware=f"{self.context.device.type} in {self.precision}",
        )
        checkpoints = self.run_dir / run_folder.CHECKPOINTS
        self.folder = CheckpointFolder(checkpoints, owner, self.config.trainer.keep_checkpoints, self.nodes)
        resumed: Checkpoint | None = None
        for warning_or_checkpoint in self.folder.newest_good():
            if isinstance(warning_or_checkpoint, str):
                self.say(f"warning: {warning_or_checkpoint}")
            else:
                resumed = warning_or_checkpoint
        if resumed is not None:
            self.stepper.load(resumed, checkpoints)
            self.step, self.progress = resumed.step, Progress.from_json(resumed.progress)
            self.say(f"resumed from step {self.step} (epoch {resumed.epoch + 1}, {resumed.position} steps into it)")
        self.folder.check()
        lines = "" if resumed is None else resumed.metrics  # those of later steps are written again
        self.metrics = MetricsFile(self.run_dir / run_folder.METRICS, lines, attempt=self.attempt.id)
        if self.metrics.damage:
            self.say(f"warning: {self.metrics.damage}")
        return resumed

    def _rows_of_ranks(self, own_row: Tensor, resumed: Checkpoint | None) -> Tensor:
        """Return the state that each rank has for itself, [world_size, n]: the checkpoint's, or rank 0's for all."""
        world_size = self.context.ranks.world_size
        if resumed is None:
            return rank_state.spread(own_row.unsqueeze(0), world_size)
        if self.config.trainer.shards:  # the checkpoint has a row for each part
            return rank_state.rows_of_ranks(resumed.own, world_size)
        return rank_state.spread(resumed.own, world_size)

    def _broadcast_position(self) -> None:
        """Give every rank rank 0's position in the run, its best evaluation, and its losses that were not read yet."""
        unread, self.progress.unread_losses = self.progress.unread_losses, []
        if len(unread) != self.steps.parts:  # another number of ranks has written them
            unread = [[]]
        numbers = (self.step, len(unread[0]), self.progress.best_accuracy, self.progress.evaluations_since_best)
        values = torch.tensor(numbers, dtype=torch.float64, device=self.context.device)
        self.context.broadcast([values])
        step, unread_steps, best_accuracy, since_best = values.tolist()
        self.step = self.saved_step = int(step)
        self.progress.best_accuracy, self.progress.evaluations_since_best = best_accuracy, int(since_best)
        self.losses.restore(int(unread_steps), unread if self.context.is_rank_zero else ())

    def _warm_up(self) -> float:
        """Run passes that change nothing, and return their seconds. The passes come before a checkpoint is loaded,
        because they create some of the state that it is copied into.
        """
        stepper, compiles = self.stepper, self.config.trainer.compile
        replicated = stepper.strategy.layout.name == "ddp" and self.context.ranks.world_size > 1
        # only in this case can Python see each gradient at the moment when it is computed
        if replicated and self.context.device.type == "cpu" and not compiles:
            HEARTBEAT.watch_gradients(self.model)
        if not stepper.warm_up_passes:
            return 0.0
        plan = self.plan(0, 0)
        stepper.begin_training()
        began = time.perf_counter()
        stepper.warm_up(plan)
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        seconds = time.perf_counter() - began
        if compiles:
            self.say(f"compiled in {seconds:.1f} s")
        return seconds

    # ------------------------------------------------------------------------------------- training
    def train(self) -> None:
        """Train to the last step, or to the end of the epoch at which the run is pruned. Raises TrainerError."""
        plan: EpochPlan | None = None
        began = time.perf_counter() - self.progress.train_s
        self.throughput.restart()
        with Termination(self.context, self.step) as termination:
            while not (self.pruned or self._is_over):
                # after SIGTERM all ranks stop after the same step, so that they can write one checkpoint
                if not termination.may_begin(self.step):
                    self._save_at_once(began)
                    termination.end()
                HEARTBEAT.begin_step(self.step + 1)
                epoch, position = self.steps.place(self.step)
                if plan is None or position == 0:  # the attempt or an epoch begins
                    plan = self.plan(epoch, position)
                    self.stepper.begin_training()
                self._one_step(plan, position)
                self.step += 1
                if self.replay is not None and self.replay.done:
                    break
                if self.progress.first_step_unix_time is None:
                    if self.context.device.type == "cuda":
                        torch.cuda.synchronize(self.context.device)
                    self.progress.first_step_unix_time = time.time()
                self._after_step(epoch, position + 1, began)
        if self._patience_is_over:
            self.say(
                f"ended early: val accuracy has not risen above {self.progress.best_accuracy:.4f} in "
                f"{self.progress.evaluations_since_best} evaluations (trainer.patience={self.config.trainer.patience})"
            )
        if self.folder is not None:
            self.folder.wait()

    def _save_at_once(self, began: float) -> None:
        """Write a checkpoint of the current step, because of SIGTERM, and wait for the disk, on all ranks."""
        if self.step != self.saved_step:
            epoch, position = self.steps.place(self.step)
            skip_nonfinite = self.config.trainer.skip_nonfinite
            # keep the losses in the checkpoint and write no line: metrics.jsonl must match an uninterrupted run's
            self.progress.unread_losses = self.losses.unread(
                self.step, saved_step=self.saved_step, skip_nonfinite=skip_nonfinite
            )
            self.progress.train_s = time.perf_counter() - began
            self._save(epoch, position)
        if self.folder is not None:
            self.folder.wait()
        self.say(f"stopped by SIGTERM after step {self.step}, which is saved: the same command goes on from there")
        self.context.wait_for_all("saved")

    def plan(self, epoch: int, position: int) -> EpochPlan:
        """Return the epoch's plan on the device, and start to prefetch images for the steps from ``position`` on."""
        plan = plan_epoch(self.config.dataset, self.pack, seed=self.config.seed, epoch=epoch).to(self.context.device)
        if self.pack.row_reader is not None:
            size = self.steps.micro_batch_size
            starts = self.steps.micro_batches(position, self.context.ranks.rank)
            self.pack.row_reader.expect(plan.batch(start, size).row_request for start in starts)
        return plan

    def _one_step(self, plan: EpochPlan, position: int) -> None:
        if self.replay is not None:
            self.losses.add(self.replay.step(self.stepper, self.run_dir, plan, self.step, position))
            return
        digests = self.digests if self.digests is not None and self.digests.is_due(self.step + 1) else None
        self.stepper.tensor_recorder = digests
        self.losses.add(self.stepper(plan, self.step, position))
        if digests is not None:
            digests.end(self.step + 1)

    def _after_step(self, epoch: int, position: int, began: float) -> None:
        """Log, evaluate and save if they are due, which depends on the step only (and on requests of rank 0)."""
        trainer = self.config.trainer
        last, epoch_ends = self.step == self.steps.total, position == self.steps.per_epoch
        # decide what is due, alike on all ranks
        evaluates = last or (epoch_ends and (epoch + 1) % trainer.eval_every_epochs == 0)
        saves = last or (epoch_ends and (epoch + 1) % trainer.checkpoint_every_epochs == 0)
        if trainer.checkpoint_every_steps is not None:
            saves = saves or self.step % trainer.checkpoint_every_steps == 0
        # the controller ends the run (a sweep prunes a trial) by a file on rank 0's host alone, but all ranks must stop
        # at the same step: the request goes to the other ranks with the losses
        if epoch_ends and not last and self.context.is_rank_zero and (self.run_dir / run_folder.PRUNE).exists():
            self.losses.request(stop=True)
        if epoch_ends or evaluates or saves or self.step % trainer.log_every_steps == 0:
            reading, rate = self._log(epoch, evaluates=evaluates)
            saves = saves or reading.checkpoint_requested
            self.progress.train_s = time.perf_counter() - began
        if evaluates:
            self.stepper.average_statistics()  # until here each part has its own batch statistics
        accuracy = self._validate(epoch) if evaluates else None
        if saves or self._patience_is_over:
            self._save(epoch, position)
        if evaluates or epoch_ends:
            self._report_epoch(epoch, reading.loss, rate, accuracy)
        if evaluates or saves:
            self.throughput.restart()

    def _log(self, epoch: int, *, evaluates: bool) -> tuple[Reading, float]:
        """Read the losses of all ranks and write a line of metrics; return what was read, and the images per second."""
        self.attempt.check()
        if self.digests is not None:
            self.digests.write()
        trainer = self.config.trainer
        minutes, passed_s = trainer.checkpoint_every_minutes, time.monotonic() - self._saved_at
        if minutes is not None and passed_s >= 60 * minutes and self.context.is_rank_zero:
            self.losses.request()  # request a checkpoint by rank 0's clock, as the ranks' clocks differ
        reading = self.losses.read(self.step, saved_step=self.saved_step, skip_nonfinite=trainer.skip_nonfinite)
        rate = self.throughput.interval(reading.steps)
        values = {"train/images_per_s": rate, "lr": self.stepper.lr(self.step - 1)}
        if math.isfinite(reading.loss):
            values["train/loss"] = reading.loss
        if self.stepper.grad_scaler is not None:
            values["train/skipped_steps"] = float(self.stepper.grad_scaler.skipped)
        if self.stepper.norm is not None and math.isfinite(norm := float(self.stepper.norm)):
            values["train/grad_norm"] = norm
        self.pruned = reading.stop_requested
        validates = evaluates and self.pack.manifest.size("val")
        self._write(epoch, values, doing="evaluating on the val split" if validates else self._after_evaluation())
        return reading, rate

    @property
    def _is_over(self) -> bool:
        """True if the last step is done, or if trainer.patience ends the run."""
        return self.step == self.steps.total or self._patience_is_over

    @property
    def _patience_is_over(self) -> bool:
        patience = self.config.trainer.patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    def _after_evaluation(self) -> str:
        """Name what follows an evaluation, for ``doing`` in metrics.jsonl."""
        if self.pruned:
            return "saving a checkpoint and ending early"
        if self._is_over:
            return "saving the last checkpoint and evaluating on the test split"
        return "training"

    def _validate(self, epoch: int) -> float | None:
        """Evaluate the val split and record the result; return its accuracy, or None if there is no such split."""
        if not self.pack.manifest.size("val"):
            return None
        with self.stepper.averaged_weights():
            result = self.evaluate("val")
            self.stepper.begin_training()
            metrics = self._record(result.metrics("val"))
            is_best = self.progress.record_accuracy(result.accuracy)
            self._write(epoch, metrics, doing=self._after_evaluation())
            if is_best and self.config.trainer.keep_best:
                self._keep_best(metrics)
        return result.accuracy

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Write best.pt, before the checkpoint that records this evaluation as the best."""
        self.check_data()
        weights = self.stepper.strategy.layout.weights()
        if self.folder is not None:
            self.folder.save_best(weights, {"step": self.step, **metrics})

    def _save(self, epoch: int, position: int) -> None:
        HEARTBEAT.enter(Phase.SAVING)
        self.check_data()
        if self.digests is not None:
            self.digests.write()
        table = self.context.gather(self.stepper.own_row())
        model, optimizer = self.stepper.copies()
        self.saved_step, self._saved_at = self.step, time.monotonic()
        if self.folder is None or self.metrics is None or table is None:  # not rank 0
            return
        self.progress.images_per_s = self.throughput.median()
        self.folder.save(
            Checkpoint(
                step=self.step,
                epoch=epoch + position // self.steps.per_epoch,
                position=position % self.steps.per_epoch,
                model=model,
                optimizer=optimizer,
                own=rank_state.rows_of_parts(table, self.steps.parts),
                progress=self.progress.as_json(),
                metrics=self.metrics.text,
            )
        )

    # ---------------------------------------------------------------------------------- the results
    def evaluate(self, split: str) -> Evaluation:
        """Evaluate a split over all ranks."""
        return Evaluator(
            model=self.model,
            pack=self.pack,
            context=self.context,
            normalise=self.normalise,
            precision=self.precision,
            batch_size=self.steps.micro_batch_size,
            tta=self.config.trainer.tta,
            shards=self.config.trainer.shards,
            seed=key(self.config.seed, self.step),
            more=self.more_metrics,
        ).evaluate(split)

    def test(self) -> Evaluation:
        """Evaluate the test split with the final weights and write its metrics."""
        self.stepper.keep_averaged_weights()
        result = self.evaluate("test")
        metrics = self._record(result.metrics("test"))
        epoch = self.steps.place(self.step - 1)[0]
        self._write(epoch, metrics, doing="writing the results and ending")
        if self.metrics is not None and (damage := self.metrics.close()):
            self.say(f"warning: {damage}")
        return result

    def check_data(self) -> None:
        """Check on all ranks that the data are unchanged, before a result of them is saved. Raises TrainerError."""
        damage = self.watch.damage() if self.watch is not None else None
        all_intact = self.context.all_reduce_min(int(damage is None))
        if damage is not None:
            raise set_aside(damage)
        if not all_intact:
            raise TrainerError("the data of another rank were altered during the training; the same command fixes it")

    def close(self) -> None:
        """Finish pending file writes and stop prefetching, also after an error."""
        if self.pack.row_reader is not None:
            self.pack.row_reader.close()
        if self.folder is not None:
            self.folder.close()

    def say(self, text: str) -> None:
        """Print a line for the user, on rank 0."""
        if self.context.is_rank_zero:
            print(text, flush=True)

    def _record(self, metrics: dict[str, float]) -> dict[str, float]:
        finite, warnings = self.progress.record_metrics(metrics, self.step)
        for warning in warnings:
            self.say(warning)
        return finite

    def _write(self, epoch: int, metrics: dict[str, float], *, doing: str) -> None:
        if self.metrics is not None:
            self.metrics.write(self.step, epoch + 1, metrics, doing=doing)

    def _report_epoch(self, epoch: int, loss: float, rate: float, accuracy: float | None) -> None:
        value = "" if accuracy is None else f"  val accuracy {accuracy:.4f}"
        total = self.steps.total
        last = -(-total // self.steps.per_epoch)  # trainer.max_steps may end it in the midst of an epoch
        # Aligned, and with its usual figures within 80 columns.
        self.say(
            f"epoch {epoch + 1:>{len(str(last))}}/{last}  step {self.step:>{len(str(total))}}/{total}"
            f"  loss {loss:.4f}{value}  {rate:,.0f} images/s"
        )
