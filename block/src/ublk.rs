//! Block devices of the local kernel over io_uring: the server's side of `ublk_drv` (Linux 6.5 and later).
//!
//! [`abi`] has the numbers and structures of the kernel's `ublk_cmd.h`, [`queue`] what becomes of each request of a hardware queue, as
//! a machine that knows no ring, and [`worker`] the thread that runs one. It sees the kernel through the trait [`worker::Kernel`]: in
//! production that is [`ring`], in tests a model of the driver. [`control`] makes, finds and removes devices, [`server`] puts them
//! all together.
//!
//! Data goes between the pages of a request and the device's own memory in one copy (`UBLK_F_USER_COPY`), or in none where the device is a
//! file of this machine and the kernel can let the ring read and write with the pages themselves (`UBLK_F_AUTO_BUF_REG`).

pub mod abi;
pub mod control;
pub mod queue;
pub mod ring;
pub mod server;
pub mod worker;

pub use control::{Control, Error};
pub use server::{Config, Server};
