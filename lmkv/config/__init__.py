"""Settings: the class `Config`, the sources and parsers of its values, and the translation of LMCache's settings."""

from lmkv.config import command_lines as command_lines, vllm_options as vllm_options
from lmkv.config.checks import server_warnings as server_warnings
from lmkv.config.options import Setting as Setting
from lmkv.config.parsers import GIB as GIB
from lmkv.config.settings import Config as Config, SettingsResult as SettingsResult
from lmkv.config.sources import read_named as read_named, read_yaml as read_yaml
