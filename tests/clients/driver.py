"""What the Python drivers share: reads the plan in argv, runs its steps on one connection, prints the report.

A driver calls run(client, package, connect). connect(plan) is an async context manager of an object with
`connected`, list() and call(name, args); both of those raise what the client's user would see.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import traceback

MODES = {"auto": "auto", "legacy": "legacy", "modern": "2026-07-28"}


def timeout_seconds(plan):
    return plan.get("timeout_ms", 30_000) / 1000


def to_json(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def connected(protocol_version, server_info, instructions):
    info = server_info and to_json(server_info)
    return {"protocol_version": protocol_version, "server_info": info, "instructions": instructions}


def failure(error):
    # The SDKs report from inside task groups; the user reads the innermost error.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    code = getattr(getattr(error, "error", None), "code", None)
    status = getattr(getattr(error, "response", None), "status_code", None)
    report = {"error": str(error) or type(error).__name__, "code": code, "status": status}
    return {key: value for key, value in report.items() if value is not None}


async def call(client, name, args):
    return to_json(await client.call(name, args or {}))


async def abort(client, name, args, after_ms):
    task = asyncio.create_task(call(client, name, args))
    done, _ = await asyncio.wait([task], timeout=after_ms / 1000)
    if not done:
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise RuntimeError("aborted by the user") from None


async def parallel(client, calls):
    results = await asyncio.gather(*(call(client, name, args) for name, args in calls), return_exceptions=True)
    return [failure(result) if isinstance(result, BaseException) else result for result in results]


async def wait_file(path):
    for _ in range(1500):
        if os.path.exists(path):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{path} did not appear within 30 s")


async def step(client, kind, *rest):
    match kind:
        case "list":
            return [to_json(tool) for tool in await client.list()]
        case "call":
            return await call(client, rest[0], rest[1] if len(rest) > 1 else None)
        case "abort":
            return await abort(client, *rest)
        case "parallel":
            return await parallel(client, rest[0])
        case "sleep":
            return await asyncio.sleep(rest[0] / 1000)
        case "touch_file":
            return open(rest[0], "w").close()
        case "wait_file":
            return await wait_file(rest[0])
    raise ValueError(f"unknown step {kind!r}")


class Gone:
    """Stands in for a client whose connection has ended: what it is asked fails as the connection did."""

    def __init__(self, error):
        self.error = error

    async def list(self):
        raise self.error

    async def call(self, name, args):
        raise self.error


async def steps(client, plan, done):
    for one in plan.get("steps", [])[len(done) :]:
        try:
            done.append({"ok": await step(client, *one)})
        except Exception as error:
            done.append(failure(error))


async def main(connect, plan, report):
    done = []
    try:
        async with connect(plan) as client:
            report |= {"connected": client.connected, "steps": done}
            await steps(client, plan, done)
    except BaseException as error:
        # The SDKs cancel whoever holds the connection when it breaks, as when the server is down for a call.
        traceback.print_exc()
        if "connected" in report:
            await steps(Gone(error), plan, done)
        else:
            failed = failure(error)
            report |= {"connect_error": failed.pop("error"), **failed}


def run(client, package, connect):
    report = {"client": client, "version": importlib.metadata.version(package)}
    asyncio.run(main(connect, json.loads(sys.argv[1]), report))
    print(json.dumps(report), flush=True)
    sys.exit(0 if "connected" in report else 3)
