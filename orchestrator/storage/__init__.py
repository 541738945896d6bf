"""What a run keeps on disk: its journal, its folder, and which versions stay."""
