//! File systems of tests that do one thing otherwise than another.

/// Methods of a [`FileSystem`](crate::fs::FileSystem) that pass what they are asked on to a field:
/// `pass_on! { inner: lookup getattr }`.
#[doc(hidden)]
#[macro_export]
macro_rules! pass_on {
    (@ $to:tt lookup) => {
        fn lookup(
            &self,
            c: &$crate::fs::Caller<'_>,
            p: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.lookup(c, p, n)
        }
    };
    (@ $to:tt getattr) => {
        fn getattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
        ) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.getattr(c, i)
        }
    };
    (@ $to:tt setattr) => {
        fn setattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            s: &$crate::fs::SetAttr,
        ) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.setattr(c, i, s)
        }
    };
    (@ $to:tt readlink) => {
        fn readlink(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
        ) -> $crate::fs::Result<Vec<u8>> {
            self.$to.readlink(c, i)
        }
    };
    (@ $to:tt mknod) => {
        fn mknod(
            &self,
            c: &$crate::fs::Caller<'_>,
            p: $crate::InodeId,
            n: &[u8],
            node: &$crate::fs::NewNode<'_>,
        ) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.mknod(c, p, n, node)
        }
    };
    (@ $to:tt unlink) => {
        fn unlink(
            &self,
            c: &$crate::fs::Caller<'_>,
            p: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<()> {
            self.$to.unlink(c, p, n)
        }
    };
    (@ $to:tt rmdir) => {
        fn rmdir(
            &self,
            c: &$crate::fs::Caller<'_>,
            p: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<()> {
            self.$to.rmdir(c, p, n)
        }
    };
    (@ $to:tt rename) => {
        fn rename(
            &self,
            c: &$crate::fs::Caller<'_>,
            r: &$crate::fs::Rename<'_>,
        ) -> $crate::fs::Result<()> {
            self.$to.rename(c, r)
        }
    };
    (@ $to:tt link) => {
        fn link(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            p: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.link(c, i, p, n)
        }
    };
    (@ $to:tt open) => {
        fn open(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            f: u32,
        ) -> $crate::fs::Result<$crate::fs::Handle> {
            self.$to.open(c, i, f)
        }
    };
    (@ $to:tt create) => {
        fn create(
            &self,
            c: &$crate::fs::Caller<'_>,
            p: $crate::InodeId,
            n: &[u8],
            m: u32,
            f: u32,
        ) -> $crate::fs::Result<($crate::fs::Attr, $crate::fs::Handle)> {
            self.$to.create(c, p, n, m, f)
        }
    };
    (@ $to:tt read) => {
        fn read(&self, h: $crate::fs::Handle, o: u64, b: &mut [u8]) -> $crate::fs::Result<usize> {
            self.$to.read(h, o, b)
        }
    };
    (@ $to:tt write) => {
        fn write(
            &self,
            h: $crate::fs::Handle,
            o: u64,
            d: &[u8],
            a: bool,
        ) -> $crate::fs::Result<$crate::fs::Written> {
            self.$to.write(h, o, d, a)
        }
    };
    (@ $to:tt fallocate) => {
        fn fallocate(
            &self,
            h: $crate::fs::Handle,
            m: u32,
            o: u64,
            l: u64,
        ) -> $crate::fs::Result<()> {
            self.$to.fallocate(h, m, o, l)
        }
    };
    (@ $to:tt lseek) => {
        fn lseek(
            &self,
            h: $crate::fs::Handle,
            o: u64,
            w: $crate::fs::Whence,
        ) -> $crate::fs::Result<u64> {
            self.$to.lseek(h, o, w)
        }
    };
    (@ $to:tt fgetattr) => {
        fn fgetattr(&self, h: $crate::fs::Handle) -> $crate::fs::Result<$crate::fs::Attr> {
            self.$to.fgetattr(h)
        }
    };
    (@ $to:tt fsync) => {
        fn fsync(&self, h: $crate::fs::Handle, d: bool) -> $crate::fs::Result<()> {
            self.$to.fsync(h, d)
        }
    };
    (@ $to:tt fsync_inode) => {
        fn fsync_inode(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
        ) -> $crate::fs::Result<()> {
            self.$to.fsync_inode(c, i)
        }
    };
    (@ $to:tt release) => {
        fn release(&self, h: $crate::fs::Handle) -> () {
            self.$to.release(h)
        }
    };
    (@ $to:tt readdir) => {
        fn readdir(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            k: u64,
            e: &mut dyn FnMut(&$crate::fs::DirEntry<'_>) -> bool,
        ) -> $crate::fs::Result<()> {
            self.$to.readdir(c, i, k, e)
        }
    };
    (@ $to:tt statfs) => {
        fn statfs(&self) -> $crate::fs::Result<$crate::fs::StatFs> {
            self.$to.statfs()
        }
    };
    (@ $to:tt getxattr) => {
        fn getxattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<Vec<u8>> {
            self.$to.getxattr(c, i, n)
        }
    };
    (@ $to:tt listxattr) => {
        fn listxattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
        ) -> $crate::fs::Result<Vec<u8>> {
            self.$to.listxattr(c, i)
        }
    };
    (@ $to:tt setxattr) => {
        fn setxattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            n: &[u8],
            v: &[u8],
            m: $crate::fs::XattrMode,
        ) -> $crate::fs::Result<()> {
            self.$to.setxattr(c, i, n, v, m)
        }
    };
    (@ $to:tt removexattr) => {
        fn removexattr(
            &self,
            c: &$crate::fs::Caller<'_>,
            i: $crate::InodeId,
            n: &[u8],
        ) -> $crate::fs::Result<()> {
            self.$to.removexattr(c, i, n)
        }
    };
    (@ $to:tt forget) => {
        fn forget(&self, i: $crate::InodeId, t: &dyn Fn() -> bool) -> () {
            self.$to.forget(i, t)
        }
    };
    (@ $to:tt keeps) => {
        fn keeps(&self, i: $crate::InodeId) -> bool {
            self.$to.keeps(i)
        }
    };
    ($to:tt: $($name:ident)*) => {
        $($crate::pass_on! { @ $to $name })*
    };
}
