"""DeepSpeed's curriculum sampler over a few samples, and a minimal engine with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from deepspeed.runtime.data_pipeline.config import get_data_efficiency_config
from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.data_pipeline.data_sampling.utils import close_mmap_dataset_builder, create_mmap_dataset_builder

SIZES = (5, 9)
"""Sizes of the clusters."""


def make_sampler(folder: Path, rank: int = 0) -> DeepSpeedDataSampler:
    """Make a sampler before the first step, without clusters; `folder`: for their files."""
    metric = {
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 8,
        "max_difficulty": 80,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
    }
    learning = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": {"seqlen": metric}}
    sampling = {"enabled": True, "num_epochs": 1, "curriculum_learning": learning}
    config = get_data_efficiency_config({"data_efficiency": {"enabled": True, "data_sampling": sampling}})
    return DeepSpeedDataSampler(config, sum(SIZES), 4, 0, 1, None, 1, rank)


def make_trained(folder: Path) -> DeepSpeedDataSampler:
    """Make the sampler of rank 0 with two clusters, after a batch."""
    sampler = make_sampler(folder)
    for number, size in enumerate(SIZES):
        path = str(folder / f"cluster_{number}")
        builder = create_mmap_dataset_builder(path, np.uint8)
        builder.add_item_numpy(np.arange(size, dtype=np.uint8))
        close_mmap_dataset_builder(builder, path)
    sampler.data_cluster_paths = [f"cluster_{number}" for number in range(len(SIZES))]
    sampler.data_cluster_current_position = [0] * len(SIZES)
    sampler.load_state_dict(sampler.state_dict())
    draw(sampler)
    return sampler


def draw(sampler: DeepSpeedDataSampler) -> list[int]:
    """Draw a batch like the sampler on rank 0."""
    counts = sampler.sample_from_clusters()
    batch = [
        int(each) for number, count in enumerate(counts) for each in sampler.get_sample_from_cluster(number, count)
    ]
    sampler.np_rng.shuffle(batch)
    return batch


def make_engine(sampler: Any, **more: Any) -> Any:
    return SimpleNamespace(
        training_dataloader=SimpleNamespace(data_sampler=sampler),
        random_ltd_enabled=lambda: False,
        lr_scheduler=None,
        seq_data_parallel_group=None,
        global_steps=1,
        **more,
    )
