"""Run an experiment: `python train.py experiment=quickstart objective=oapl lag=4`."""

import logging
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError
from tqdm.contrib.logging import logging_redirect_tqdm

from callbacks.dry_run import print_schedule
from callbacks.sharded_strategy import make_policy
from conf.processes import RESULT, is_for_several, quiet_logging, run_alone, run_ranks
from conf.resume import is_finished, starting_point
from conf.starting_policy import make_once
from conf.suggestions import check_choices, check_keys, check_values
from datamodules import ranks

log = logging.getLogger("train")
# Said of what is meant to be: a resumed directory, a value that all ranks have, a type that Lightning itself asks for.
warnings.filterwarnings("ignore", "Checkpoint directory .* not empty|.*sync_dist=True|.*LeafSpec")
CONF = Path(__file__).parent / "conf"
ALL_THREADS = torch.get_num_threads()


def train(cfg: DictConfig) -> float:
    """Run one experiment and return its last held-out accuracy, NaN when none was measured."""
    callbacks = [instantiate(node) for node in cfg.callbacks.values()]
    loggers = [instantiate(node) for node in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    trainer._signal_connector.register_signal_handlers = lambda: None  # on SIGTERM it enters a collective, and hangs
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
    policy = make_policy(trainer.strategy, lambda: instantiate(cfg.policy))
    module = instantiate(cfg.policy_module, policy=policy)
    data.use(module.policy)
    directory = Path(cfg.directory)
    ranks.check_same(text := OmegaConf.to_yaml(cfg, resolve=True))
    again = ranks.was_started_again(os.environ)
    if again and ranks.from_main(lambda: is_finished(directory, trainer.max_epochs)):
        log.info("%s is finished", directory)
        return float("nan")
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
    """Make the starting policy, unless it is there: here, or where several processes train, in one of its own."""
    as_yaml = partial(OmegaConf.to_yaml, resolve=True)
    make_once(cfg, as_yaml, train if ranks.world_size() == 1 else lambda cfg: run_alone(as_yaml(cfg)))


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run one job of Hydra's."""
    check_keys(OmegaConf.to_container(cfg), CONF)
    try:
        check_values(OmegaConf.to_container(cfg, resolve=True), CONF)
    except InterpolationKeyError as error:
        raise ValueError(f"{error.full_key} takes its value from a key that is not there: {error.msg}") from error
    if is_for_several(cfg.trainer):
        return run_ranks(OmegaConf.to_yaml(cfg, resolve=True), cfg.trainer.devices, cfg.trainer.num_nodes)
    accuracy = train(cfg)
    if RESULT in os.environ and ranks.rank() == 0:
        Path(os.environ[RESULT]).write_text(str(accuracy))  # for the job that started this one
    return accuracy


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets `finally` end the engine process
    check_choices(sys.argv[1:], CONF)
    with ranks.joined():
        if ranks.rank():
            sys.argv += quiet_logging()  # rank 0 writes the files
        main()
