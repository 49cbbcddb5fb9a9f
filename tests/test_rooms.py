"""Every package keeps the rules of rooms, names and files that `tools/rooms.py` prints.

Exceptions stand in `tools/rules/names.py` (class names that several packages share, exported names
that clash) and in `tools/rules/privates.py` (private names of other projects), with a reason each;
one that nothing needs any more fails here.
"""

import ast
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

from rules import checks
from rules.docstrings import find_raised_errors
from rules.exports import import_all
from rules.names import EXPORTED_CLASHES, SAME_ROLE
from rules.package import (
    find_packages,
    our_names,
    python_files,
    tracked_files,
    yard_files,
)
from rules.privates import FOREIGN, find_private_accesses

PACKAGES = find_packages(ROOT)
OURS = our_names(PACKAGES, ROOT)
every_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def hold(violations):
    """Fails with every violation on a line of its own."""
    found = sorted(violations)
    if found:
        pytest.fail("\n".join(map(str, found)), pytrace=False)


@pytest.fixture(scope="module")
def imported():
    """What importing all modules of all packages changed; once, since torch takes long."""
    return import_all(PACKAGES, [package.home.parent for package in PACKAGES])


@every_package
def test_exported_names_stay_what_they_are_when_all_modules_are_imported(package, imported):
    changed, missing = imported[package.name]
    if missing:
        warnings.warn(f"not imported, for want of a library: {missing}", stacklevel=1)
    assert changed == []


@every_package
def test_no_room_has_the_name_of_an_exported_function(package):
    hold(checks.check_room_names(package))


@every_package
def test_folders_are_small_and_each_role_has_one_word(package):
    hold(checks.check_entries(package))


@every_package
def test_no_rooms_import_each_other_in_a_circle(package):
    hold(checks.check_circles(package))


@every_package
def test_file_names_say_what_a_file_holds(package):
    hold(checks.check_file_names(package))


@every_package
def test_docstrings_describe_what_exported_names_raise(package):
    assert len(list(find_raised_errors(package))) >= 10
    hold(checks.check_raises(package))


def test_class_names_exist_once_in_a_package_and_mean_one_role():
    hold(violation for _, violation in checks.check_class_names(PACKAGES))


def test_listed_class_names_are_still_shared():
    assert checks.unused_names(PACKAGES) == []
    assert not set(SAME_ROLE).intersection(EXPORTED_CLASHES)


@every_package
def test_nobody_touches_privates_of_our_objects(package):
    folder = str(package.folder.relative_to(ROOT))
    files = python_files(ROOT, folder, f"bench/{package.name}")
    hold(checks.check_privates(files, ROOT, OURS))


def test_the_yard_touches_no_privates():
    hold(checks.check_privates(yard_files(ROOT, PACKAGES), ROOT, OURS))


def test_listed_foreign_privates_are_still_needed():
    files = python_files(ROOT, "shared", "packages", "bench", "tests", "tools")
    used = {access.foreign for path in files for access in find_private_accesses(path, OURS)}
    assert sorted(set(FOREIGN) - used) == []


def test_attributes_listed_as_foreign_are_no_privates_of_ours():
    anywhere = {name[1:] for name in FOREIGN if name.startswith(".")}
    ours = {
        node.attr
        for package in PACKAGES
        for module in package.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
    }
    assert sorted(anywhere & ours) == []


@pytest.mark.parametrize(
    "folder", [*(str(p.folder.relative_to(ROOT)) for p in PACKAGES), "tests"], ids=str
)
def test_every_tracked_data_file_is_named(folder):
    tracked = tracked_files(ROOT)
    if tracked is None:
        pytest.skip("needs git and a clone: an unpacked archive has no list of tracked files")
    hold(checks.check_tracked_files(folder, tracked, ROOT))
