"""Models that change while they are served, and a service that ends: no request is lost."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

from mivhead.service.application import create_app
from mivhead.service.engine import ModelLoader
from mivhead.service.server import Server
from tests.helpers.services import toy
from tests.helpers.web import web
from tests.service.conftest import PATH, Waiting, clients, photo, train


def test_a_model_is_replaced_garbled_and_deleted_under_load(
    model_file: Path, tmp_path: Path
) -> None:
    path, other = tmp_path / "model.miv", tmp_path / "other.miv"
    shutil.copy(model_file, path)
    train(("red", "blue")).save(other)

    async def main() -> None:
        statuses: list[int] = []
        async with clients(path, reload_seconds=0.01) as client:

            async def ask() -> None:
                while True:
                    response = await client.post(PATH, files={"images": photo("red")})
                    statuses.append(response.status_code)

            async def until(problem: bool, classes: int) -> None:
                while True:
                    (model,) = (await client.get("/v1/models")).json()["models"]
                    if (model["problem"] is not None, len(model["classes"])) == (problem, classes):
                        return
                    await asyncio.sleep(0)

            load = [asyncio.create_task(ask()) for _ in range(3)]
            await until(False, 3)
            shutil.copy(other, tmp_path / "new")
            (tmp_path / "new").replace(path)
            await until(False, 2)
            path.write_bytes(other.read_bytes()[:-100] + bytes(100))
            await until(True, 2)
            shutil.copy(model_file, tmp_path / "new")
            (tmp_path / "new").replace(path)
            await until(False, 3)
            path.rename(tmp_path / "away")
            await until(True, 3)
            (tmp_path / "away").rename(path)  # the same file comes back
            await until(False, 3)
            count = len(statuses)
            while len(statuses) < count + 5:
                await asyncio.sleep(0)
            for task in load:
                task.cancel()
        assert set(statuses) == {200}

    asyncio.run(main())


def test_requests_in_progress_are_answered_at_the_end(model_file: Path) -> None:
    backbone = Waiting()
    server = Server(create_app([model_file], load=ModelLoader(backbone=backbone)), port=0)
    running = threading.Thread(target=server.serve_forever)
    running.start()
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(web.post(server.url + PATH, files={"images": photo("red")}))
    )
    asking.start()
    assert backbone.entered.wait(60)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    backbone.go.set()
    for thread in (stopping, asking, running):
        thread.join()
    assert answers[0].status_code == 200


def test_the_backbone_is_shared_by_models(model_file: Path, tmp_path: Path) -> None:
    train(("red", "blue")).save(tmp_path / "two.miv")
    load = ModelLoader(backbone=toy())
    assert load(model_file).backbone is load(tmp_path / "two.miv").backbone
