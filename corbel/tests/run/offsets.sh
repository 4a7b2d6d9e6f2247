# One open file description has one offset: through shells, dup, fork, exec, and programs that
# cannot be hooked ($STATIC is a static cat, echo and head). $1: directory.
cd $1; rm -rf off; mkdir off; cd off
exec 3>f; echo A >&3; /bin/echo B >&3; perl -e 'syswrite STDOUT, "C\n"' >&3; "$STATIC" echo D >&3; echo E >&3; (echo F; "$STATIC" echo G) >&3; echo H >&3; exec 3>&-; cat f
python3 -c "
import os
fd=os.open('g',os.O_RDWR|os.O_CREAT); os.write(fd,b'0123456789'); f=os.fdopen(os.dup(fd),'w'); f.write('STDIO'); f.flush(); os.write(fd,b'abc'); os.lseek(fd,0,0); print(os.read(fd,100))"
cat <<X
heredoc $((1+1))
X
"$STATIC" cat <<X
static heredoc
X
while read l; do echo "got $l"; done < f
{ read a; "$STATIC" head -n1; } < f
exec 4<>f; read x <&4; echo $x; /bin/cat <&4 | wc -l; exec 4<&-
