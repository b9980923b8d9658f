# SPDX-License-Identifier: GPL-2.0
"""Keep the settings of the user and of the machine out of the programs that the lab starts."""

import os
import re

# Variables that change what make, kbuild, compilers, git, tar, QEMU or the dynamic linker do.
STEERING = re.compile(
    r"ARCH|SUBARCH|CROSS_COMPILE|LLVM|LOCALVERSION|O|V|W|C"
    r"|MAKEFLAGS|MFLAGS|GNUMAKEFLAGS|MAKELEVEL|MAKEFILES"
    r"|K(?:BUILD|CONFIG)_\w+|K(?:C|CPP|A|RUST)FLAGS"
    r"|CC|CXX|LD|AR|HOSTCC|(?:HOST)?(?:C|CPP|CXX|LD)FLAGS"
    r"|CPATH|(?:C|CPLUS)_INCLUDE_PATH|LIBRARY_PATH|PKG_CONFIG\w*|CCACHE_\w+"
    r"|RUSTFLAGS|CARGO_(?:BUILD|ENCODED|TARGET|PROFILE|UNSTABLE)_\w+|RUSTC\w*"
    r"|GIT_(?:DIR|WORK_TREE|INDEX_FILE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|COMMON_DIR"
    r"|PREFIX|NAMESPACE|CEILING_DIRECTORIES|EXTERNAL_DIFF|DIFF_OPTS|PAGER)"
    r"|TAR_OPTIONS|GZIP|XZ_(?:OPT|DEFAULTS)|ZSTD_\w+|GREP_OPTIONS|POSIXLY_CORRECT"
    r"|CDPATH|BASH_ENV|ENV"
    r"|QEMU_\w+|LD_(?:PRELOAD|LIBRARY_PATH|BIND_NOW)"
)
LANGUAGE = re.compile(r"LANG|LANGUAGE|LC_\w+")
LOCALE = "C.UTF-8"  # messages are read, and names may have any character
UMASK = 0o022  # packages and archives keep the modes of files


def settle() -> list[str]:
    """Give this process, and all that it starts, the lab's locale and umask, and no steering
    variable.

    Returns the names of the variables that it removed.
    """
    os.umask(UMASK)
    removed = [name for name in os.environ if STEERING.fullmatch(name)]
    for name in [*removed, *filter(LANGUAGE.fullmatch, os.environ)]:
        del os.environ[name]
    os.environ["LC_ALL"] = LOCALE
    return removed
