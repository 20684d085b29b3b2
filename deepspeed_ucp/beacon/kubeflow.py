"""Progress of a TrainJob for Kubeflow Trainer's controller (``TrainJobStatus``)."""

from __future__ import annotations

import atexit
import json
import logging
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..platforms import find_rank
from . import Listener

logger = logging.getLogger("deepspeed_ucp")

_CERTIFICATE, _TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
_PAUSE, _TIMEOUT = 5.0, 5.0
"""Minimum seconds between two posts, and timeout of a post."""


class Kubeflow(Listener):
    """Posts the newest step from a thread.

    Args:
        certificate: path of the server's CA certificate; None uses those of the system.
        token: path of the token, which is renewed.
    """

    def __init__(self, url: str, certificate: str | None, token: str) -> None:
        self.url, self.certificate, self.token = url, certificate, token
        self.first: tuple[int, float] | None = None
        self.newest: dict[str, Any] | None = None
        self.posted: dict[str, Any] | None = None
        self.fails = False
        self.updated, self.lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._keep_posting, daemon=True, name="kubeflow").start()
        atexit.register(self._post_newest)

    def report_step(self, step: int, total: int | None) -> None:
        now = time.monotonic()
        self.first = self.first or (step, now)
        status: dict[str, Any] = {"metrics": [{"name": "step", "value": str(step)}]}
        if total and step <= total:
            status["progressPercentage"] = 100 * step // total
            if step > self.first[0]:
                status["estimatedRemainingSeconds"] = round(
                    (now - self.first[1]) / (step - self.first[0]) * (total - step)
                )
        self.newest = status
        self.updated.set()

    def _keep_posting(self) -> None:
        while True:
            self.updated.wait()
            self.updated.clear()
            self._post_newest()
            time.sleep(_PAUSE)

    def _post_newest(self) -> None:
        with self.lock:
            status = self.newest
            if status is None or status is self.posted:
                return
            self.posted = status
            try:
                self._post({**status, "lastUpdatedTime": datetime.now(UTC).isoformat()})
                self.fails = False
            except (OSError, ValueError) as error:  # includes the errors of urllib and ssl
                if not self.fails:
                    logger.warning("the progress cannot be posted to Kubeflow Trainer, training continues: %s", error)
                self.fails = True

    def _post(self, status: Mapping[str, Any]) -> None:
        with open(self.token, encoding="utf-8") as stream:
            token = stream.read().strip()
        request = urllib.request.Request(
            self.url,
            json.dumps({"trainerStatus": status}).encode(),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        context = ssl.create_default_context(cafile=self.certificate) if self.url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=_TIMEOUT, context=context):
            pass


def find(url: str) -> Kubeflow | None:
    """Return the listener on rank 0 if the controller's token exists, else None."""
    token = os.environ.get(_TOKEN)
    if not token or find_rank() > 0 or not os.path.exists(token):
        return None
    return Kubeflow(url, os.environ.get(_CERTIFICATE) or None, token)
