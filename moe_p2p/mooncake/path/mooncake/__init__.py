"""`import mooncake` where this folder is on the path. Other modules are an installed Mooncake's."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
