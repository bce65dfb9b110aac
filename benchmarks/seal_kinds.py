"""Ways in which a script reads a file, one a function: ``PATH`` is the file's, which may be missing in the run's copy.

Each is the body of a script's line; what it raises is caught by whoever runs it.
"""

from __future__ import annotations

SEEN = {
    "open": "open(PATH).read()",
    "open of bytes": "open(os.fsencode(PATH), 'rb').read()",
    "io.open": "import io; io.open(PATH, encoding='utf-8').read()",
    "os.open": "os.close(os.open(PATH, os.O_RDONLY))",
    "pathlib": "import pathlib; pathlib.Path(PATH).read_text()",
    "codecs": "import codecs; codecs.open(PATH, encoding='utf-8').read()",
    "exec": "exec(open(PATH).read())",
    "import by a computed name": "sys.path.insert(0, os.path.dirname(PATH)); "
    "importlib.import_module(os.path.basename(PATH)[:-3])",
    "spec_from_file_location": "spec = importlib.util.spec_from_file_location('plant', PATH); "
    "spec.loader.exec_module(importlib.util.module_from_spec(spec))",
    "runpy": "import runpy; runpy.run_path(PATH)",
    "linecache": "import linecache, tokenize; tokenize.open(PATH).close(); linecache.getlines(PATH)",
    "configparser": "import configparser; configparser.ConfigParser().read_file(open(PATH))",
    "json helper under the project": "import reading_helper; reading_helper.load(PATH)",
    "glob and open": "import glob; [open(one).close() for one in glob.glob(glob.escape(PATH)) or [PATH]]",
    "chdir and open": "here = os.getcwd()\ntry:\n    os.chdir(os.path.dirname(PATH)); open(os.path.basename(PATH))\n"
    "except FileNotFoundError:\n    open(PATH)\nfinally:\n    os.chdir(here)",
    "mmap": "import mmap; file = open(PATH, 'rb'); mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()",
    "numpy.load": "import numpy; numpy.load(PATH, allow_pickle=True)",
    "numpy.loadtxt": "import numpy; numpy.loadtxt(PATH, dtype=str)",
    "if it exists": "file = open(PATH) if os.path.exists(PATH) else None",
    "yaml": "import yaml; yaml.safe_load(open(PATH))",
    "zipfile": "import zipfile; zipfile.ZipFile(PATH)",
    "size alone": "os.path.getsize(PATH)",
    "sqlite3": "import sqlite3; sqlite3.connect(PATH).close(); open(PATH).close()",
    "thread": "import threading; one = threading.Thread(target=quietly, args=[PATH]); one.start(); one.join()",
    "fork": "child = os.fork()\nif child == 0:\n    quietly(PATH); os._exit(0)\nos.waitpid(child, 0)",
    "multiprocessing spawn": "import multiprocessing; "
    "one = multiprocessing.get_context('spawn').Process(target=reading_helper.quietly, args=[PATH]); "
    "one.start(); one.join()",
    "Python child": "import subprocess; subprocess.run([sys.executable, '-c', 'import sys; open(sys.argv[1])', PATH],"
    " stderr=subprocess.DEVNULL)",
    "cat child": "import subprocess; subprocess.run(['cat', PATH], capture_output=True)",
    "shell child": "os.system('sort < ' + shlex.quote(PATH) + ' > /dev/null 2>&1')",
}
"""What the seal is told of."""

UNSEEN = {
    "fopen of a C library": "import ctypes; ctypes.CDLL(None).fopen(os.fsencode(PATH), b'r')",
    "python -S child": "import subprocess; subprocess.run([sys.executable, '-S', '-c', 'import sys; open(sys.argv[1])',"
    " PATH], stderr=subprocess.DEVNULL)",
    "names alone": "[name for name in os.listdir(os.path.dirname(PATH)) if name == os.path.basename(PATH)]",
}
"""What it isn't."""

HELPER = """
def load(path):
    import json
    with open(path) as file:
        try:
            json.load(file)
        except ValueError:
            pass

def quietly(path):
    try:
        open(path).close()
    except OSError:
        pass
"""
