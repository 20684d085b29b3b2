"""Check that your model resumes exactly on any number of ranks and ZeRO stage.

```python
def train(ds_config):                       # in a module that can be imported
    model = make_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    yield engine
    while True:
        x, y = batch(engine.global_steps, rank=dist.get_rank(), ranks=dist.get_world_size())
        loss = loss_fn(engine(x), y)
        engine.backward(loss)
        engine.step()
        yield loss.item()


def test_resumes(resume_equivalence):       # with pytest_plugins = ["deepspeed_ucp.testing.pytest_plugin"]
    both = {"train_batch_size": 12, "optimizer": {"type": "AdamW"}}
    resume_equivalence(
        train,
        source={"world_size": 4, "ds_config": {**both, "zero_optimization": {"stage": 1}}},
        target={"world_size": 3, "ds_config": {**both, "zero_optimization": {"stage": 3}}},
    )
```
"""

from __future__ import annotations

from deepspeed_ucp.testing.resume import LOSS_TOLERANCE, Launch, ResumeReport, assert_resume_equivalent
from deepspeed_ucp.testing.world import World, WorldFailure, WorldPool, WorldTimeout

__all__ = [
    "LOSS_TOLERANCE",
    "Launch",
    "ResumeReport",
    "World",
    "WorldFailure",
    "WorldPool",
    "WorldTimeout",
    "assert_resume_equivalent",
]
