"""The Python API: light to import, documented, typed, and in step with the command line."""

import inspect
import subprocess
import sys

import pytest

from dflash_offline import api
from dflash_offline.errors import UsageError

HEAVY = ("torch", "transformers", "datasets", "zarr", "numpy", "pydantic", "httpx2")


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, dflash_offline; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_functions_themselves_do_not_import_torch():
    code = "import sys, dflash_offline; dflash_offline.train_drafter; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_no_name_is_hidden_by_a_module_of_the_package():
    import dflash_offline.export
    import dflash_offline.train

    assert sorted(api.__all__) == sorted(dflash_offline.__all__)
    for name in dflash_offline.__all__:
        assert callable(getattr(dflash_offline, name)) and name in dir(dflash_offline)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dflash_offline.nonsense


@pytest.mark.parametrize("name", api.__all__)
def test_every_function_says_what_it_takes_gives_and_raises(name):
    function = getattr(api, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    text = function.__doc__
    assert "Args:" in text and "Returns:" in text and "Raises:" in text
    assert all(f"{parameter}:" in text or f"{parameter}," in text for parameter in signature.parameters)


def test_wrong_recipes_are_refused_as_on_the_command_line():
    with pytest.raises(UsageError, match="did you mean 'epochs'"):
        api.train_drafter({"cache": "c", "run": "r", "training": {"epoch": 2}})
    with pytest.raises(UsageError, match="no recipe 'no-such'"):
        api.extract_cache("no-such")
    with pytest.raises(UsageError, match="by name or path"):
        api.prepare_cache({}, overrides=["cache=x"])
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        api.regenerate_answers("x.jsonl", "y.jsonl", servers=["http://h"], temprature=1.0)
