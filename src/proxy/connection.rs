//! A client's TCP connection, with the clocks that hyper does not have.
//!
//! hyper's own header timeout also runs while a kept-alive connection is idle, so it would have to be either too
//! long against slow senders or too short for the connection pools of clients and reverse proxies. Here the two
//! are apart: a request's head must be complete a short while after its first byte (or after the connection was
//! made), an idle connection may stay longer, and nothing is timed while a request is being answered.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A timer for one task. Once it waits, polling it again costs next to nothing: that task's waker stays the same.
#[derive(Debug)]
pub struct Alarm {
    sleep: Pin<Box<Sleep>>,
    is_waiting: bool,
}

impl Alarm {
    /// It goes off at `deadline`.
    pub fn new(deadline: Instant) -> Self {
        Alarm { sleep: Box::pin(tokio::time::sleep_until(deadline.into())), is_waiting: false }
    }

    /// When it goes off.
    pub fn deadline(&self) -> Instant {
        self.sleep.deadline().into_std()
    }

    /// Sets it to another time.
    pub fn set(&mut self, deadline: Instant) {
        self.sleep.as_mut().reset(deadline.into());
        self.is_waiting = false;
    }

    /// Whether it has gone off; if not, it wakes the task when it does.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_waiting && !self.sleep.is_elapsed() {
            return Poll::Pending;
        }
        let polled = self.sleep.as_mut().poll(cx);
        self.is_waiting = polled.is_pending();
        polled
    }
}

/// Says that a request is being answered; shared by the stream and the service of one connection.
#[derive(Debug, Clone, Default)]
pub struct Busy(Arc<AtomicBool>);

impl Busy {
    /// A request's head has been read.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// The answer's head is ready.
    pub fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The times that a connection is granted.
#[derive(Debug, Clone, Copy)]
pub struct Clocks {
    /// From a request's first byte to the end of its head.
    pub head: Duration,
    /// Between two requests.
    pub idle: Duration,
    /// Without the client taking anything of what is written to it.
    pub write_stall: Duration,
}

/// A stream whose reads and writes fail once its client has been too slow.
#[derive(Debug)]
pub struct ClientStream<S> {
    inner: S,
    busy: Busy,
    clocks: Clocks,
    /// When the head that is being read began.
    head_since: Option<Instant>,
    last_activity: Instant,
    /// Re-armed only when it fires, so that it costs nothing per request.
    timer: Option<Alarm>,
    /// Runs while the client takes nothing.
    stall: Option<Pin<Box<Sleep>>>,
    /// When the client last sent anything.
    last_read: Instant,
    /// How much it has sent.
    read_bytes: usize,
    /// Runs while the rest of what a client sends is thrown away after our last byte.
    linger: Option<Pin<Box<Sleep>>>,
    lingered: usize,
    /// Bytes that were read already, to be read again.
    rewound: Bytes,
}

/// How long a client may go on sending after our last byte. A connection that is closed while bytes wait unread is
/// reset, and the client never reads what it was told: that its body is too large, or its token wrong.
const LINGER: Duration = Duration::from_secs(2);
/// How much of that is thrown away.
const LINGER_BYTES: usize = 16 * 1024 * 1024;

impl<S> ClientStream<S> {
    /// A new connection. Its first head is awaited from now on.
    pub fn new(inner: S, busy: Busy, clocks: Clocks) -> Self {
        let now = Instant::now();
        ClientStream {
            inner,
            busy,
            clocks,
            head_since: Some(now),
            last_activity: now,
            timer: None,
            stall: None,
            last_read: now,
            read_bytes: 0,
            linger: None,
            lingered: 0,
            rewound: Bytes::new(),
        }
    }

    /// After an upgrade there are no requests to time, and `read` comes first. Writes are still timed.
    pub fn upgraded(mut self, read: Bytes) -> Self {
        self.busy.begin();
        self.timer = None;
        self.rewound = read;
        self
    }

    /// When the client last sent anything. Bytes are a sign of life before a frame of them is complete.
    pub fn last_read(&self) -> Instant {
        self.last_read
    }

    /// How many bytes have been read, in all.
    pub fn read_bytes(&self) -> usize {
        self.read_bytes
    }

    /// When reading must have succeeded, as things are now.
    fn deadline(&self) -> Option<Instant> {
        if self.busy.is_set() {
            return None;
        }
        Some(self.head_since.map_or(self.last_activity + self.clocks.idle, |since| since + self.clocks.head))
    }

    fn poll_clock(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            let Some(deadline) = self.deadline() else { return Poll::Pending };
            let timer = self.timer.get_or_insert_with(|| Alarm::new(deadline));
            // A timer that fires too early is set again below; one that would fire too late must be set now.
            if timer.deadline() > deadline {
                timer.set(deadline);
            }
            ready!(timer.poll(cx));
            if Instant::now() >= deadline {
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "the client was too slow"));
            }
            timer.set(deadline);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.rewound.is_empty() {
            let len = this.rewound.len().min(buf.remaining());
            buf.put_slice(&this.rewound[..len]);
            this.rewound.advance(len);
            this.read_bytes += len;
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.inner).poll_read(cx, buf) {
            Poll::Ready(result) => {
                this.read_bytes += buf.filled().len() - before;
                this.last_read = Instant::now();
                if this.busy.is_set() {
                    this.head_since = None;
                } else {
                    this.head_since.get_or_insert(this.last_read);
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                if this.busy.is_set() {
                    this.head_since = None;
                }
                this.poll_clock(cx).map(Err)
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.wrote(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.wrote(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
        // hyper does not read again once an answer is out: the clock of the idle connection is wound up here, and
        // stops the next read.
        let _not_yet = self.poll_clock(cx);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
            this.linger = Some(Box::pin(tokio::time::sleep(LINGER)));
        }
        let mut thrown_away = [0; 4096];
        loop {
            if this.linger.as_mut().is_some_and(|linger| linger.as_mut().poll(cx).is_ready()) {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::new(&mut thrown_away);
            match ready!(Pin::new(&mut this.inner).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() && this.lingered < LINGER_BYTES => {
                    this.lingered += buffer.filled().len();
                }
                // The client has nothing more to say, has gone, or goes on and on.
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl<S> ClientStream<S> {
    /// Minds the clocks after a write: the head before it is over, and the connection is not idle.
    fn wrote(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.head_since = None;
            self.last_activity = Instant::now();
            self.stall = None;
            return written;
        }
        let write_stall = self.clocks.write_stall;
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(write_stall)));
        ready!(stall.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const CLOCKS: Clocks = Clocks {
        head: Duration::from_millis(100),
        idle: Duration::from_millis(300),
        write_stall: Duration::from_millis(200),
    };

    #[tokio::test]
    async fn a_head_has_its_time_and_an_idle_connection_a_longer_one() {
        let (mut client, server) = duplex(64);
        let busy = Busy::default();
        let start = Instant::now();
        let mut server = ClientStream::new(server, busy.clone(), CLOCKS);
        assert_eq!(server.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((100..250).contains(&start.elapsed().as_millis()));

        // A head is read and answered: then the longer time runs.
        client.write_all(b"ab").await.unwrap();
        server.read_u8().await.unwrap();
        busy.begin();
        server.read_u8().await.unwrap();
        busy.end();
        server.write_all(b"x").await.unwrap();
        let start = Instant::now();
        assert_eq!(server.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((300..450).contains(&start.elapsed().as_millis()));

        // The first byte of the next head starts the short time again; more bytes do not extend it.
        let start = Instant::now();
        let drip = tokio::spawn(async move {
            for _ in 0..20 {
                client.write_all(b"c").await.unwrap();
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        });
        while server.read_u8().await.is_ok() {}
        assert!(start.elapsed() < Duration::from_millis(250));
        drip.abort();
    }

    #[tokio::test]
    async fn nothing_is_timed_while_a_request_is_answered() {
        let (_client, server) = duplex(64);
        let busy = Busy::default();
        let mut server = ClientStream::new(server, busy.clone(), CLOCKS);
        busy.begin();
        assert!(tokio::time::timeout(Duration::from_millis(500), server.read_u8()).await.is_err());
    }

    #[tokio::test]
    async fn a_client_may_be_slow_to_take_but_not_take_nothing() {
        let (mut client, server) = duplex(10);
        let mut server = ClientStream::new(server, Busy::default(), CLOCKS);
        let slow = tokio::spawn(async move {
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                client.read_exact(&mut [0; 10]).await.unwrap();
            }
            client
        });
        server.write_all(&[0; 80]).await.unwrap();
        let _client = slow.await.unwrap();
        let start = Instant::now();
        assert_eq!(server.write_all(&[0; 80]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((200..400).contains(&start.elapsed().as_millis()));
    }

    #[tokio::test]
    async fn bytes_read_before_an_upgrade_come_first() {
        let (mut client, server) = duplex(64);
        client.write_all(b"cd").await.unwrap();
        let mut server = ClientStream::new(server, Busy::default(), CLOCKS).upgraded(Bytes::from_static(b"ab"));
        let mut bytes = [0; 4];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"abcd");
    }
}
