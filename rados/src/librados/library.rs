//! The library itself: the functions of it that are used, and how it is found.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use base::library::Library;
use base::library_functions;

const LIBRADOS: Library = Library {
    name: c"librados.so.2",
    title: "librados",
    lacking: "it is older than Ceph 14",
    remedy: "install it: apt install librados2",
};

pub(super) type Raw = *mut c_void;
// SAFETY: of all three: the library calls them with what it was given for that, and they are called by nobody else.
pub(super) type Finished = unsafe extern "C" fn(Raw, *mut c_void);
pub(super) type Notified = unsafe extern "C" fn(*mut c_void, u64, u64, u64, *mut c_void, usize);
pub(super) type Broken = unsafe extern "C" fn(*mut c_void, u64, c_int);

library_functions! {
    /// The functions of the library that are used, as librados.h declares them since version 14.
    pub(super) struct Lib;
    create: c"rados_create", fn(*mut Raw, *const c_char) -> c_int;
    read_conf: c"rados_conf_read_file", fn(Raw, *const c_char) -> c_int;
    parse_env: c"rados_conf_parse_env", fn(Raw, *const c_char) -> c_int;
    set_conf: c"rados_conf_set", fn(Raw, *const c_char, *const c_char) -> c_int;
    get_conf: c"rados_conf_get", fn(Raw, *const c_char, *mut c_char, usize) -> c_int;
    connect: c"rados_connect", fn(Raw) -> c_int;
    shutdown: c"rados_shutdown", fn(Raw);
    instance: c"rados_get_instance_id", fn(Raw) -> u64;
    pool_lookup: c"rados_pool_lookup", fn(Raw, *const c_char) -> i64;
    pool_name: c"rados_pool_reverse_lookup", fn(Raw, i64, *mut c_char, usize) -> c_int;
    io_create: c"rados_ioctx_create", fn(Raw, *const c_char, *mut Raw) -> c_int;
    io_destroy: c"rados_ioctx_destroy", fn(Raw);
    io_create_of: c"rados_ioctx_create2", fn(Raw, i64, *mut Raw) -> c_int;
    io_id: c"rados_ioctx_get_id", fn(Raw) -> i64;
    set_namespace: c"rados_ioctx_set_namespace", fn(Raw, *const c_char);
    set_snaps: c"rados_ioctx_selfmanaged_snap_set_write_ctx", fn(Raw, u64, *mut u64, c_int) -> c_int;
    list_open: c"rados_nobjects_list_open", fn(Raw, *mut Raw) -> c_int;
    list_next: c"rados_nobjects_list_next", fn(Raw, *mut *const c_char, *mut *const c_char, *mut *const c_char) -> c_int;
    list_close: c"rados_nobjects_list_close", fn(Raw);
    completion: c"rados_aio_create_completion", fn(*mut c_void, Option<Finished>, Option<Finished>, *mut Raw) -> c_int;
    returned: c"rados_aio_get_return_value", fn(Raw) -> c_int;
    release: c"rados_aio_release", fn(Raw);
    write_op: c"rados_create_write_op", fn() -> Raw;
    write_op_release: c"rados_release_write_op", fn(Raw);
    op_write: c"rados_write_op_write", fn(Raw, *const c_char, usize, u64);
    op_write_full: c"rados_write_op_write_full", fn(Raw, *const c_char, usize);
    op_zero: c"rados_write_op_zero", fn(Raw, u64, u64);
    op_truncate: c"rados_write_op_truncate", fn(Raw, u64);
    op_remove: c"rados_write_op_remove", fn(Raw);
    op_exec: c"rados_write_op_exec", fn(Raw, *const c_char, *const c_char, *const c_char, usize, *mut c_int);
    write: c"rados_aio_write_op_operate", fn(Raw, Raw, Raw, *const c_char, *mut libc::time_t, c_int) -> c_int;
    read: c"rados_aio_read", fn(Raw, *const c_char, Raw, *mut c_char, usize, u64) -> c_int;
    read_op: c"rados_create_read_op", fn() -> Raw;
    read_op_release: c"rados_release_read_op", fn(Raw);
    op_read: c"rados_read_op_read", fn(Raw, u64, usize, *mut c_char, *mut usize, *mut c_int);
    operate: c"rados_aio_read_op_operate", fn(Raw, Raw, Raw, *const c_char, c_int) -> c_int;
    command: c"rados_mon_command", fn(Raw, *mut *const c_char, usize, *const c_char, usize, *mut *mut c_char, *mut usize, *mut *mut c_char, *mut usize) -> c_int;
    exec: c"rados_exec", fn(Raw, *const c_char, *const c_char, *const c_char, *const c_char, usize, *mut c_char, usize) -> c_int;
    lockers: c"rados_list_lockers", fn(Raw, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
    watch: c"rados_watch3", fn(Raw, *const c_char, *mut u64, Option<Notified>, Option<Broken>, u32, *mut c_void) -> c_int;
    unwatch: c"rados_unwatch2", fn(Raw, u64) -> c_int;
    watch_flush: c"rados_watch_flush", fn(Raw) -> c_int;
    notify: c"rados_notify2", fn(Raw, *const c_char, *const c_char, c_int, u64, *mut *mut c_char, *mut usize) -> c_int;
    buffer_free: c"rados_buffer_free", fn(*mut c_char);
    shut_out: c"rados_blacklist_add", fn(Raw, *mut c_char, u32) -> c_int;
    notify_ack: c"rados_notify_ack", fn(Raw, *const c_char, u64, u64, *const c_char, c_int) -> c_int;
}

static LIB: OnceLock<Result<Lib, String>> = OnceLock::new();

/// Loads the library, once.
///
/// # Errors
/// It is not there, or is another one; with what to do.
pub fn load() -> Result<(), String> {
    lib().map(drop)
}

pub(super) fn lib() -> Result<&'static Lib, String> {
    LIB.get_or_init(|| Lib::find(&LIBRADOS.load()?)).as_ref().map_err(Clone::clone)
}
