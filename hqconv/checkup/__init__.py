"""The check of a published checkpoint, alone or against its original. See docs/check.md."""
