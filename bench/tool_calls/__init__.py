"""How many recorded model outputs the parser reads right: the public suite `canitoolcall`."""
