"""A run of one seed: training, test and the files it writes."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from ..distributed.monitor import RankMonitor
from ..distributed.ranks import is_first, missing
from ..seeds.fitting import Outcome
from ..settings.hashing import MODEL
from ..settings.settings import Settings
from ..tasks.metrics import ACCURACY, ROC_AUC
from ..tasks.model import members
from ..tasks.task import Task
from ..training.batching import is_divided
from ..training.progress import MetricsFile, Progress
from ..training.resume import Resumable
from ..training.stopping import PaperStopping
from .build import build_data, build_module, build_trainer
from .folder import Job, finished
from .model_file import save_model
from .network import Built, initial_model
from .process import deterministic, device_name, elements, peak_mib, reset_peak, suited_threads
from .pruning import Pruner, Pruning
from .reference_scores import baselines_of, has_baselines
from .result import CHECKPOINT, METRICS, Result, versions


def one_run(settings: Settings, task: Task, seed: int, folder: Path, pruner: Pruner | None = None) -> Result | None:
    """Train with one seed, test the best weights, and write the outputs.

    Returns:
        The result, or None if no epoch had a finite validation loss and score, or the run was pruned.
    """
    reset_peak()
    built = initial_model(settings, task, seed)
    model, training = built.model, settings.training
    stopping = PaperStopping(training.patience, training.criterion)
    resumable = Resumable(folder / CHECKPOINT, seed, settings.checkpoint_every)
    monitor = RankMonitor()
    title = task.name if settings.runs == 1 else f"{task.name}, seed {seed}"
    progress = Progress(title)
    pruning = [Pruning([(pruner, [stopping])])] if pruner is not None else []
    callbacks = [monitor, stopping, *pruning, MetricsFile(folder / METRICS), resumable, progress]
    module = build_module(settings, task, model)
    with deterministic(), suited_threads(elements(task, training.batch_size, [model])):
        trainer = build_trainer(settings.trainer, settings.logger, folder, callbacks)
        data = build_data(settings.loader, training, task, model, trainer, seed)
        is_whole = not settings.loader.is_drawn and not is_divided(trainer)
        if not task.has_many_graphs and trainer.world_size > 1 and is_whole:
            of_nodes = "trainer.strategy=halo to give each a part, or loader=neighbor or loader=cluster."
            of_pairs = "loader=neighbor, or +loader.num_links=1024 to divide the pairs of a step."
            raise ValueError(
                f"{task.name} is one graph, which {trainer.world_size} processes do not divide by default. Use "
                f"{of_pairs if task.objective.has_pairs else of_nodes}"
            )
        name = task.objective.metric.name
        fit = members(model).fit
        if is_first():
            save_run_settings(Job(settings, folder), seed)
        try:
            if fit is not None:  # a method that is not trained in epochs
                if task.shared_graph is None:
                    raise ValueError(f"{type(model).__name__} fits one graph, but {task.name} has many.")
                root = trainer.strategy.root_device
                model.to(root)
                start = time.perf_counter()
                fit(task.shared_graph.clone().to(root))
                seconds = time.perf_counter() - start
                val = trainer.validate(module, datamodule=data, verbose=False)[0][f"val_{name}"]
            else:
                trainer.fit(module, datamodule=data, ckpt_path=Job(settings, folder).checkpoint)
                seconds, val = resumable.seconds, stopping.kept_score
                if not stopping.best_epoch or (pruner is not None and pruner.ended):
                    return None
            tested = {
                key.removeprefix("test_"): score
                for key, score in trainer.test(module, datamodule=data, verbose=False)[0].items()
            }
            if name == ACCURACY.name and task.num_classes == 2 and has_baselines(settings):  # own data
                with suppress(ValueError):  # undefined
                    ranked = build_module(settings, task.scored_by(ROC_AUC.name), model)
                    (scores,) = trainer.test(ranked, datamodule=data, verbose=False)
                    tested[ROC_AUC.name] = scores[f"test_{ROC_AUC.name}"]
        except RuntimeError as error:
            if monitor.lost:
                raise ValueError(missing(monitor.lost, trainer.world_size)) from error
            if str(error).startswith("DataLoader worker"):
                if resumable.status is not None:  # a signal to all processes came before the worker ignored it
                    raise SystemExit(resumable.status) from None
                raise ValueError(
                    "A worker process (loader.num_workers) ended or was killed, perhaps for lack of memory. The same "
                    "command with ckpt_path=last continues from the last checkpoint; loader.num_workers may differ."
                ) from error
            raise
        device = device_name(trainer)
    others = {key: round(score, 5) for key, score in tested.items() if key not in ("loss", name)}
    outcome = Outcome(seed, name, tested[name], val, stopping.epoch, stopping.best_epoch, seconds, others)
    return write_outputs(settings, task, outcome, built, device, folder)


def save_run_settings(run: Job, seed: int) -> None:
    """Write the settings of one seed's run into its folder."""
    run._replace(settings=run.settings.replace(seed=seed, runs=1, ckpt_path=run.started_from)).save_settings()


def write_outputs(
    settings: Settings,
    task: Task,
    outcome: Outcome,
    built: Built,
    device: str,
    folder: Path,
    order: int | None = None,
) -> Result:
    """Write the trained model and the result of one seed; `order` is as in `Result`."""
    model, target, arguments = built
    factory = settings.model
    constant, error = task.constant
    baselines = baselines_of(settings, task)
    result = Result(
        method=factory.name,
        dataset=task.name,
        metric=outcome.metric,
        value=round(outcome.value, 5),  # Lightning logs float32
        seed=outcome.seed,
        epochs=outcome.epochs,
        best_epoch=outcome.best_epoch,
        val=round(outcome.val, 5),
        seconds=round(outcome.seconds, 3),
        seconds_per_epoch=round(outcome.seconds / max(outcome.epochs, 1), 6),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        versions=versions(),
        device=device,
        config_hash=settings.hash,
        run_dir=str(folder),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        majority=round(constant, 5),
        standard_error=round(error, 5),
        baselines=baselines and {name: round(score, 5) for name, score in baselines.scores.items()},
        baselines_error=baselines and round(baselines.standard_error, 5),
        item=task.objective.item,
        scores={name: score for name, score in outcome.scores.items() if score == score} or None,
        row=factory.method,
        form=factory.get("form") or "",
        study=factory.get("study") or "",
        split=settings.split_number,
        order=order,
        peak_mib=None if (peak := peak_mib()) is None else round(peak, 1),
        data=settings.data_hash,
    )
    if is_first():
        metadata = {"method": factory.name, "dataset": task.name, "objective": task.objective.to_dict()}
        save_model(folder / MODEL, model, target, arguments, **metadata, preparation=task.preparation.to_dict())
        result.save(folder)
        finished(folder, settings.results)
    return result
