"""The shapes of every array that a traced function computes, loops and calls included."""


def shapes_in(jaxpr):
    """Shapes of all inputs and results, in nested jaxprs too."""
    for array in arrays_in(jaxpr):
        yield array.shape


def arrays_in(jaxpr):
    """Abstract values of all inputs and results that have a shape."""
    for variable in (*jaxpr.invars, *jaxpr.constvars):
        yield variable.aval
    for equation in equations_in(jaxpr):
        for variable in equation.outvars:
            if hasattr(variable.aval, "shape"):
                yield variable.aval


def equations_in(jaxpr):
    """All equations, in nested jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                # A nested program is a jaxpr, or one closed over its constants.
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from equations_in(inner)
