"""Run an experiment: `python train.py experiment=quickstart objective=oapl lag=4`."""

import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import hydra
import lightning as L
import torch
from filelock import FileLock
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm.contrib.logging import logging_redirect_tqdm

from callbacks.dry_run import print_schedule
from conf.alone import run_alone
from conf.resume import starting_point
from conf.suggestions import check_choices, check_keys
from datamodules import ranks

log = logging.getLogger("train")
ALL_THREADS = torch.get_num_threads()


def train(cfg: DictConfig) -> float:
    """Run one experiment and return its last held-out accuracy, NaN when none was measured."""
    callbacks = [instantiate(node) for node in cfg.callbacks.values()]
    loggers = [instantiate(node) for node in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    ranks.check(trainer.world_size)
    data = instantiate(cfg.datamodule)
    instantiate(cfg.objective)  # what can be refused is refused before a warm start or a large model is paid for
    if cfg.get("dry_run"):
        ranks.from_main(lambda: print_schedule(data, cfg, make_policy=lambda: instantiate(cfg.policy)))
        return float("nan")
    if cfg.get("warm_start"):
        ranks.from_main(lambda: warm_start(cfg.warm_start))
    torch.set_num_threads(cfg.num_threads or ALL_THREADS)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    module = instantiate(cfg.policy_module)
    data.use(module.policy)
    directory = Path(cfg.directory)
    text = OmegaConf.to_yaml(cfg, resolve=True)
    ranks.check_same(text)
    again = ranks.was_started_again(os.environ)
    start = ranks.from_main(lambda: starting_point(cfg.ckpt_path, cfg.get("resume", False), directory, again=again))
    start.check_readable(is_sharded=hasattr(trainer.strategy, "shard"))
    try:
        ranks.from_main(lambda: start.take(data.run_directory, text))
        with logging_redirect_tqdm():  # log lines above the progress bars, not through them
            trainer.fit(module, datamodule=data, ckpt_path=start.checkpoint, weights_only=False)
    finally:
        data.close()
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()  # a sweep's next job must not log into this run
    return float(trainer.callback_metrics.get("eval/accuracy", "nan"))


def warm_start(cfg: DictConfig) -> None:
    """Make the starting policy by a run of its own, unless its directory holds the result of the same config."""
    directory = Path(cfg.directory)
    wanted = OmegaConf.to_yaml(cfg, resolve=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        done = directory / "done.yaml"
        if done.is_file() and done.read_text() == wanted:
            log.info("warm start: taken from %s", directory)
            return
        if directory.exists() and not done.is_file():
            raise ValueError(f"warm_start.directory: {directory} was not made by a warm start; choose another")
        log.info("warm start: training %s, once for this configuration", directory)
        cfg.directory = f"{directory}.unfinished"  # what is there stays until there is a better one
        shutil.rmtree(cfg.directory, ignore_errors=True)
        accuracy = train(cfg) if ranks.world_size() == 1 else run_alone(OmegaConf.to_yaml(cfg, resolve=True))
        if not accuracy >= cfg.callbacks.stop.stopping_threshold:
            raise RuntimeError(f"the warm start ended at accuracy {accuracy}, short of its stopping_threshold")
        Path(cfg.directory, "done.yaml").write_text(wanted)
        shutil.rmtree(directory, ignore_errors=True)
        Path(cfg.directory).rename(directory)
        cfg.directory = str(directory)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run one job of Hydra's."""
    check_keys(OmegaConf.to_container(cfg), Path(__file__).parent / "conf")
    return train(cfg)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets `finally` end the engine process
    check_choices(sys.argv[1:], Path(__file__).parent / "conf")
    ranks.join()
    if ranks.rank():
        sys.argv += ranks.quiet_logging()  # rank 0 writes the files
    main()
    ranks.leave()
