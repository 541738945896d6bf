"""A small environment of OpenEnv: guess a word by its number of letters.

It knows nothing of splice and nothing of verifiers. OpenEnv's server runs it:

python -m uvicorn guess_env:app
"""

import random
import re

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import ConfigDict

WORDS = ("yes", "no", "maybe")
GUESSES = 2
SESSIONS = 64
"""Most episodes at once. OpenEnv's default is one."""


def _without_metadata(schema):
    del schema["properties"]["metadata"]


class Guess(Action):
    """What the model says."""

    # verifiers shows the schema to the model in every turn, and no guess needs OpenEnv's own field.
    model_config = ConfigDict(json_schema_extra=_without_metadata)
    word: str


class Hint(Observation):
    """What the environment says."""

    hint: str


class GuessEnvironment(Environment):
    """Two guesses. The first one is worth 1, the second one 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self._word = State(), ""

    @property
    def state(self):
        """Number of guesses so far."""
        return self._state

    def reset(self, seed=None, episode_id=None, **more):
        """Choose a word."""
        self._word = random.choice(WORDS) if seed is None else WORDS[seed % len(WORDS)]
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(hint=self._question())

    def step(self, action, timeout_s=None, **more):
        """Judge a guess: the first of the words that it names."""
        self._state.step_count += 1
        named = re.search("|".join(WORDS), action.word)
        if named is not None and named[0] == self._word:
            return Hint(hint="Right.", reward=1 / self._state.step_count, done=True)
        done = self._state.step_count == GUESSES
        return Hint(hint=f"Wrong. {self._question()}", reward=0.0, done=done)

    def _question(self):
        return f"Say yes, no or maybe: the one of {len(self._word)} letters."


app = create_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=SESSIONS)
