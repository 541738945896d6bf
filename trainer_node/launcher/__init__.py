"""The trainer's launcher on one host: starts the ranks from a template, and starts them again."""
