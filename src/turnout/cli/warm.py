"""`turnout warm`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from turnout.cli.common import Json, console, errors, print_json


def warm(
    models: Annotated[
        list[str], typer.Argument(help="Models by name (turnout race --list), or [bold]all[/bold].")
    ],
    size: Annotated[str, typer.Option(help="tiny, small, full, or the numbers of one: 480x832x81.")] = "full",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; default: the model's own.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The card to compile for, h200 say; default: the one that is here.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Kernels at a time; default: one for each core.")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compile nothing, say what is missing; exit code 1 if anything is."),
    ] = False,
    json: Json = False,
) -> None:
    """Compile all that a model's call launches on a card, ahead and in parallel, into Triton's cache on disk.

    Needs no GPU: in a Docker image, say, so that the first call on the card compiles nothing. The model is
    built without weights, accelerated, and its call is planned; nothing runs. Kernels go where the program
    will look for them, ~/.triton/cache or TRITON_CACHE_DIR, and count for the same Triton, turnout and kind
    of card. Ends with exit code 1 when a kernel does not compile.

    [bold]Example[/bold]  turnout warm wan-vae --device h200

    [bold]Example[/bold]  turnout warm flux-vae --size 768x1360 --device h200 --check
    """
    from turnout.race.ahead import specs_of_race
    from turnout.race.models import names_of
    from turnout.routing.names import model_dtype_named
    from turnout.warming import warmed
    from turnout.warming.compiling import Compiler, most_jobs
    from turnout.warming.progress import Bar

    begun = time.perf_counter()
    names = names_of(models)
    card = warmed.card_named(device)
    wanted = None if dtype is None else model_dtype_named(dtype)
    jobs = warmed.check_jobs(most_jobs() if jobs is None else jobs)
    with Compiler() as compiler, Bar(errors) as bar:
        specs = []
        for name in names:
            bar.plan(name)
            specs += specs_of_race(name, size, wanted, card)
        compiled = warmed.compile_specs(
            compiler,
            list(dict.fromkeys(specs)),
            card,
            jobs=jobs,
            fewest=None if check else 1,
            progress=bar.tell,
            begun=begun,
        )
    if json:
        kernels = [kernel._asdict() for kernel in compiled.kernels]
        print_json(
            {"models": names, "size": size, "ready": compiled.ready, **vars(compiled), "kernels": kernels}
        )
    else:
        console.print(str(compiled))
    if not compiled.ready:
        raise typer.Exit(1)
