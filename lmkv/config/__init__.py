"""Settings: `Config`, what LMCache's are here, and where remote stores are."""

from lmkv.config.settings import GIB as GIB, Config as Config, Setting as Setting, read_yaml as read_yaml
