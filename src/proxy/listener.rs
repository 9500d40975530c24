//! Where the proxy listens: at a TCP address, or on a Unix socket for a reverse proxy on the same machine.
//!
//! The socket is bound here, or was bound by systemd and passed on, which keeps it while the program restarts.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Deserializer};
use tokio::net::{TcpListener, TcpStream};
#[cfg(unix)]
use tokio::net::{UnixListener, UnixStream};

/// How a peer counts that connects over a Unix socket: it is on this machine, and has no address.
const UNIX_PEER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// What a Unix socket's path begins with in the settings.
const UNIX_PREFIX: &str = "unix:";

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// An address and a port; port 0 is any free one.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl Listen {
    /// Whether only this machine can connect.
    pub fn is_local(&self) -> bool {
        self.ip().is_loopback()
    }

    /// The address that is listened on, as seen by the rules for addresses.
    pub fn ip(&self) -> IpAddr {
        self.tcp().map_or(UNIX_PEER, |address| address.ip())
    }

    /// The TCP address, if it is one.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Listen::Tcp(address) => Some(*address),
            Listen::Unix(_) => None,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Tcp(address) => write!(f, "{address}"),
            Listen::Unix(path) => write!(f, "{UNIX_PREFIX}{}", path.display()),
        }
    }
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.strip_prefix(UNIX_PREFIX) {
            Some(path) if cfg!(unix) && !path.is_empty() => Ok(Listen::Unix(path.into())),
            Some(_) => Err(serde::de::Error::custom(format!("'{text}' names no Unix socket that there can be here"))),
            None => text.parse().map(Listen::Tcp).map_err(serde::de::Error::custom),
        }
    }
}

/// A client's connection.
#[cfg(unix)]
pub type Stream = tokio_util::either::Either<TcpStream, UnixStream>;
/// A client's connection.
#[cfg(not(unix))]
pub type Stream = TcpStream;

/// A socket that listens.
#[derive(Debug)]
pub enum Listener {
    /// On TCP.
    Tcp(TcpListener),
    /// On a Unix socket.
    #[cfg(unix)]
    Unix(unix::Socket),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Listener::Tcp(listener)
    }
}

impl Listener {
    /// Binds what the settings say. The file of a Unix socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// If it cannot be bound.
    pub async fn bind(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp(address) => TcpListener::bind(address).await.map(Listener::Tcp),
            #[cfg(unix)]
            Listen::Unix(path) => unix::Socket::bind(path).await.map(Listener::Unix),
            #[cfg(not(unix))]
            Listen::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the socket has no address.
    pub fn address(&self) -> io::Result<Listen> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Listen::Tcp),
            #[cfg(unix)]
            Listener::Unix(socket) => socket.path().map(Listen::Unix),
        }
    }

    /// The next connection, and whom it counts for.
    pub(crate) async fn accept(&self) -> io::Result<(Stream, IpAddr)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Frames and answers are small and someone waits for each of them.
                let _delayed = stream.set_nodelay(true);
                #[cfg(unix)]
                let stream = Stream::Left(stream);
                Ok((stream, address.ip().to_canonical()))
            }
            #[cfg(unix)]
            Listener::Unix(socket) => Ok((Stream::Right(socket.accept().await?), UNIX_PEER)),
        }
    }
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::FileTypeExt;
    use std::path::Path;

    use listenfd::ListenFd;

    use super::*;

    /// A Unix socket.
    #[derive(Debug)]
    pub struct Socket {
        listener: UnixListener,
        /// The file to remove at the end; none if it is systemd's.
        own: Option<PathBuf>,
    }

    impl Drop for Socket {
        fn drop(&mut self) {
            if let Some(path) = &self.own {
                // Nobody listens there any more, so it only stands in the way.
                let _left_behind = std::fs::remove_file(path);
            }
        }
    }

    impl Socket {
        pub(super) async fn bind(path: &Path) -> io::Result<Self> {
            let listener = match UnixListener::bind(path) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path).await => {
                    std::fs::remove_file(path)?;
                    UnixListener::bind(path)?
                }
                bound => bound?,
            };
            Ok(Socket { listener, own: Some(path.to_owned()) })
        }

        pub(super) fn path(&self) -> io::Result<PathBuf> {
            let address = self.listener.local_addr()?;
            address.as_pathname().map(Path::to_owned).ok_or_else(|| io::Error::other("the Unix socket has no path"))
        }

        pub(super) async fn accept(&self) -> io::Result<UnixStream> {
            Ok(self.listener.accept().await?.0)
        }
    }

    /// Whether this is a socket's file that was left behind.
    async fn is_abandoned(path: &Path) -> bool {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        is_socket && UnixStream::connect(path).await.is_err_and(refused)
    }

    impl Listener {
        /// The socket that systemd passed on, if it did. Which one it is, its `.socket` unit says, and no setting.
        ///
        /// # Errors
        /// If there are several, or it is none that can be listened on.
        pub fn passed() -> io::Result<Option<Self>> {
            let mut passed = ListenFd::from_env();
            if passed.len() > 1 {
                return Err(io::Error::other(format!("{} sockets were passed on", passed.len())));
            }
            if let Ok(Some(listener)) = passed.take_tcp_listener(0) {
                listener.set_nonblocking(true)?;
                return TcpListener::from_std(listener).map(|listener| Some(Listener::Tcp(listener)));
            }
            let Some(listener) = passed.take_unix_listener(0)? else { return Ok(None) };
            listener.set_nonblocking(true)?;
            let listener = UnixListener::from_std(listener)?;
            Ok(Some(Listener::Unix(Socket { listener, own: None })))
        }
    }
}

#[cfg(not(unix))]
impl Listener {
    /// The socket that was passed on: none, for only systemd does that.
    ///
    /// # Errors
    /// Never.
    pub fn passed() -> io::Result<Option<Self>> {
        Ok(None)
    }
}
