//! The audit log's file. A thread of its own writes it, so that a disk that hangs holds up nothing else: what does not
//! fit into its queue is lost, and lost lines are counted and told.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

use super::file;

/// How many lines may wait to be written. A line has some hundred bytes.
const QUEUE: usize = 8192;
/// How often it is told at the most that lines were lost.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);
/// How often a full queue is tried again at the end.
const CLOSE_PAUSE: Duration = Duration::from_millis(10);

/// The lines that were lost: of the process, as its subscriber is.
static LOSSES: Losses = Losses::new();

#[derive(Debug)]
struct Losses {
    lost: AtomicU64,
    /// Why the last one was.
    last: Mutex<Option<String>>,
    /// How many of them were told, and when.
    told: Mutex<(u64, Option<Instant>)>,
}

impl Losses {
    const fn new() -> Self {
        Losses { lost: AtomicU64::new(0), last: Mutex::new(None), told: Mutex::new((0, None)) }
    }

    fn count(&self, why: &dyn std::fmt::Display) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_string());
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// How many lines of the audit log were lost.
pub fn lines_lost() -> u64 {
    LOSSES.lost.load(Ordering::Relaxed)
}

/// Tells, now and then, that lines were lost.
pub fn complain(now: Instant) {
    let mut told = LOSSES.told.lock().unwrap_or_else(PoisonError::into_inner);
    let lost = lines_lost();
    let is_due = told.1.is_none_or(|at| now.saturating_duration_since(at) >= COMPLAINT_INTERVAL);
    if lost > told.0 && is_due {
        let why = LOSSES.last.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
        tracing::error!(lost = lost - told.0, lost_in_all = lost, why, "the audit log lost lines");
        *told = (lost, Some(now));
    }
}

/// The audit log.
#[derive(Debug, Clone)]
pub struct Audit {
    messages: SyncSender<Message>,
    /// Set when the file is to be opened anew. A flag, for the queue may be full.
    reopen: Arc<AtomicBool>,
    losses: &'static Losses,
}

#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    /// There is something to do.
    Wake,
    /// Says when all before it is written.
    Written(SyncSender<()>),
}

impl Audit {
    /// Opens the file, or makes it, for its owner alone.
    ///
    /// # Errors
    /// If it cannot be opened, or is neither a regular file nor a character device.
    pub fn open(path: PathBuf) -> io::Result<Self> {
        let log = Log::open(&path, &LOSSES)?;
        Self::start(log, path)
    }

    fn start(mut log: Log, path: PathBuf) -> io::Result<Self> {
        let (messages, received) = sync_channel(QUEUE);
        let reopen = Arc::new(AtomicBool::new(false));
        let (wanted, losses) = (Arc::clone(&reopen), log.losses);
        // It ends with the last handle, or with the process.
        std::thread::Builder::new().name("audit".into()).spawn(move || log.serve(&received, &wanted, &path))?;
        Ok(Audit { messages, reopen, losses })
    }

    /// Has the file opened anew, because the old one was moved away. If it cannot be, the old one is written on.
    pub fn reopen(&self) {
        self.reopen.store(true, Ordering::Release);
        // If there is no room for it, there are lines, and the flag is seen with the next one.
        let _full = self.messages.try_send(Message::Wake);
    }

    /// Waits until everything is written, but no longer than `most`.
    pub fn flush(&self, most: Duration) {
        let until = Instant::now() + most;
        let (done, written) = sync_channel(1);
        while self.messages.try_send(Message::Written(done.clone())).is_err() {
            if Instant::now() >= until {
                return tracing::error!("the last lines of the audit log could not be written in time");
            }
            std::thread::sleep(CLOSE_PAUSE);
        }
        if written.recv_timeout(until.saturating_duration_since(Instant::now())).is_err() {
            tracing::error!("the last lines of the audit log could not be written in time");
        }
    }
}

impl<'a> MakeWriter<'a> for Audit {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Takes one line.
#[derive(Debug)]
pub struct Line<'a>(&'a Audit);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.0.messages.try_send(Message::Line(line.to_vec())).is_err() {
            self.0.losses.count(&"too many lines wait to be written");
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The file while the thread has it.
struct Log {
    file: Box<dyn Write + Send>,
    /// It ends within a line.
    is_torn: bool,
    losses: &'static Losses,
}

impl Log {
    fn open(path: &Path, losses: &'static Losses) -> io::Result<Self> {
        let file = file::append(path)?;
        // What a full disk or a lost process left there.
        let mut last = [b'\n'];
        if file.metadata()?.is_file()
            && let Ok(mut file) = File::open(path)
            && file.seek(SeekFrom::End(-1)).is_ok()
        {
            file.read_exact(&mut last)?;
        }
        Ok(Log { file: Box::new(file), is_torn: last != *b"\n", losses })
    }

    fn serve(&mut self, messages: &Receiver<Message>, reopen: &AtomicBool, path: &Path) {
        while let Ok(message) = messages.recv() {
            if reopen.swap(false, Ordering::Acquire) {
                match Log::open(path, self.losses) {
                    Ok(log) => *self = log,
                    Err(error) => {
                        tracing::error!(%error, "the audit log cannot be opened anew; the old file is written on");
                    }
                }
            }
            match message {
                Message::Line(line) => self.write(line),
                Message::Wake => {}
                Message::Written(done) => _ = done.try_send(()),
            }
        }
    }

    fn write(&mut self, mut line: Vec<u8>) {
        if self.is_torn {
            line.insert(0, b'\n');
        }
        let mut written = 0;
        while written < line.len() {
            match self.file.write(&line[written..]) {
                Ok(0) => return self.lost(written, &"nothing more is taken"),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.lost(written, &error),
            }
        }
        self.is_torn = false;
    }

    /// A part of a line may have been written, so that the next one must begin with a line end.
    fn lost(&mut self, written: usize, why: &dyn std::fmt::Display) {
        self.losses.count(why);
        let ended = usize::from(self.is_torn);
        self.is_torn = written > ended || (self.is_torn && written == 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for some bytes, and its only file.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(usize, Vec<u8>)>>);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let (room, file) = &mut *self.0.lock().unwrap();
            let written = bytes.len().min(*room);
            *room -= written;
            file.extend_from_slice(&bytes[..written]);
            if written == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(written) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn after_half_a_line_the_next_one_begins_on_its_own_wherever_the_disk_was_full() {
        for room in 0..20 {
            let disk = Disk::default();
            disk.0.lock().unwrap().0 = room;
            let losses: &'static Losses = Box::leak(Box::new(Losses::new()));
            let mut log = Log { file: Box::new(disk.clone()), is_torn: false, losses };
            let whole = ["first", "second", "third"];
            for line in whole {
                log.write(format!("{line}\n").into_bytes());
            }
            disk.0.lock().unwrap().0 = 1000;
            log.write(b"fourth\n".to_vec());
            let text = String::from_utf8(disk.0.lock().unwrap().1.clone()).unwrap();
            let mut lines = text.lines().rev();
            assert_eq!(lines.next(), Some("fourth"), "{text:?}");
            // Of a line without its end it cannot be told whether it is whole.
            let kept = whole.iter().filter(|line| text.lines().any(|kept| kept == **line)).count() as u64;
            let lost = losses.lost.load(Ordering::Relaxed);
            assert!(lost == 3 - kept || lost == 4 - kept, "{lost} {text:?}");
            assert!(!text.contains("\n\n") && !text.starts_with('\n'), "{text:?}");
            assert!(lines.all(|line| whole.iter().any(|whole| whole.starts_with(line))), "{text:?}");
        }
    }

    #[test]
    fn half_a_line_of_an_earlier_process_is_left_alone() {
        let path = std::env::temp_dir().join(format!("openclaw-audit-{}", uuid::Uuid::new_v4()));
        for (before, after) in [("", "new\n"), ("old\n", "old\nnew\n"), ("ol", "ol\nnew\n")] {
            std::fs::write(&path, before).unwrap();
            let audit = Audit::open(path.clone()).unwrap();
            audit.make_writer().write_all(b"new\n").unwrap();
            audit.flush(Duration::from_secs(20));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_disk_that_hangs_holds_up_nobody_and_what_is_lost_is_counted() {
        let (mut reader, writer) = io::pipe().unwrap();
        let losses: &'static Losses = Box::leak(Box::new(Losses::new()));
        let log = Log { file: Box::new(writer), is_torn: false, losses };
        let (audit, since) = (Audit::start(log, PathBuf::new()).unwrap(), Instant::now());
        // More than the pipe and the queue take.
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        for _ in 0..2 * QUEUE {
            audit.make_writer().write_all(&line).unwrap();
        }
        let lost = losses.lost.load(Ordering::Relaxed);
        assert!(lost > 0 && lost < 2 * QUEUE as u64, "{lost}");
        audit.flush(Duration::from_millis(50));
        assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
        drop(audit);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all.len() as u64, (2 * QUEUE as u64 - lost) * 1024, "what waits is written when it goes on");
    }
}
