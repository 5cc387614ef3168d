"""The spec classes: what a spec file may say."""
