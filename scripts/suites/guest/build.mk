# What guests build: programs of the tests in C, and one that is run. Nothing of it may name the directory.
objects := $(patsubst %.c,%.o,$(wildcard source/run/*.c))

all: all.a sum

source/run/registers.o: flags = -masm=intel

%.o: %.c
	gcc -O1 $(flags) -c -o $@ $<

all.a: $(objects)
	rm -f $@
	ar rcD $@ $^

sum: sum.c
	gcc -O1 -o $@ $<

sum.c:
	printf '#include <stdio.h>\nint main(void) { unsigned c, s = 0; while ((c = getchar()) != (unsigned) EOF) s = s * 31 + c; printf("%%u\\n", s); return 0; }\n' > $@
