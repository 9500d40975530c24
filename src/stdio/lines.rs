//! The two pipes: stdin cut into lines, and lines put on stdout.
//!
//! Each pipe has a thread of its own that blocks on it, because a pipe may stall for as long as the program at its
//! other end likes. The threads end with their pipe, or with the process; nobody waits for them to be unblocked.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};

use tokio::sync::{mpsc, oneshot};

/// The longest line that is read: four times the proxy's default bound for a body, which is as much as the proxy
/// reads before it answers that a body is too large.
pub const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;
/// What is kept of a longer line, to find the request's id in it.
const KEPT_BYTES: usize = 64 * 1024;
/// Lines that wait to be looked at.
const INPUT_QUEUE: usize = 16;
/// Lines that wait to be written.
const OUTPUT_QUEUE: usize = 64;

/// One line of input, without its end.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A whole line.
    Whole(Vec<u8>),
    /// The beginning of a line that is longer than [`MAX_LINE_BYTES`].
    TooLong(Vec<u8>),
}

/// Reads lines until the end of `input`; then the receiver is closed.
///
/// # Errors
/// If no thread can be started.
pub fn read(input: impl Read + Send + 'static) -> std::io::Result<mpsc::Receiver<Line>> {
    let (sender, receiver) = mpsc::channel(INPUT_QUEUE);
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut input = BufReader::with_capacity(64 * 1024, input);
        loop {
            match next_line(&mut input, MAX_LINE_BYTES) {
                Ok(Some(line)) => {
                    if sender.blocking_send(line).is_err() {
                        return;
                    }
                }
                Ok(None) => return,
                Err(error) => return tracing::warn!(%error, "stdin cannot be read"),
            }
        }
    })?;
    Ok(receiver)
}

/// The next line that is not blank; `None` at the end. The last line need not be ended.
fn next_line(input: &mut impl BufRead, limit: usize) -> std::io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut is_too_long = false;
    loop {
        let available = match input.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let is_end = available.is_empty();
        let newline = memchr::memchr(b'\n', available);
        let part = &available[..newline.unwrap_or(available.len())];
        if !is_too_long {
            line.extend_from_slice(part);
            if line.len() > limit {
                is_too_long = true;
                line.truncate(KEPT_BYTES);
                line.shrink_to_fit();
            }
        }
        let used = part.len() + usize::from(newline.is_some());
        input.consume(used);
        if newline.is_none() && !is_end {
            continue;
        }
        if is_too_long {
            return Ok(Some(Line::TooLong(line)));
        }
        if !line.trim_ascii().is_empty() {
            return Ok(Some(Line::Whole(line)));
        }
        if is_end {
            return Ok(None);
        }
        line.clear();
    }
}

/// The lines that are to be written. Cloned for everybody who answers.
pub type Output = mpsc::Sender<Vec<u8>>;

/// Writes each line that is sent to the first channel; the second resolves when all senders are gone and everything
/// is written, or `output` takes no more.
///
/// # Errors
/// If no thread can be started.
pub fn write(mut output: impl Write + Send + 'static) -> std::io::Result<(Output, oneshot::Receiver<()>)> {
    let (sender, mut receiver) = mpsc::channel::<Vec<u8>>(OUTPUT_QUEUE);
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("stdout".into()).spawn(move || {
        while let Some(mut line) = receiver.blocking_recv() {
            line.push(b'\n');
            if let Err(error) = output.write_all(&line).and_then(|()| output.flush()) {
                tracing::warn!(%error, "stdout cannot be written");
                break;
            }
        }
        // Nobody listens any more if the program is stopping at once.
        let _sent = ended.send(());
    })?;
    Ok((sender, end))
}

/// `json`, a checked document, on one line: line ends can only stand between its tokens.
pub fn one_line(json: &[u8]) -> Vec<u8> {
    let mut line = json.trim_ascii().to_vec();
    for byte in &mut line {
        if matches!(byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut input: &[u8], limit: usize) -> Vec<Line> {
        std::iter::from_fn(|| next_line(&mut input, limit).unwrap()).collect()
    }

    #[test]
    fn lines_are_cut_at_newlines_and_blank_ones_are_skipped() {
        let lines = all(b"\n{\"a\":1}\r\n  \n\xff\nlast", 100);
        let expected = [&b"{\"a\":1}\r"[..], b"\xff", b"last"];
        assert_eq!(lines, expected.map(|line| Line::Whole(line.to_vec())));
    }

    #[test]
    fn a_line_over_the_limit_is_cut_and_the_next_one_is_read() {
        let input = [b"a".repeat(8), b"b".repeat(9), b"c".to_vec()].join(&b'\n');
        let expected = [Line::Whole(b"a".repeat(8)), Line::TooLong(b"b".repeat(9)), Line::Whole(b"c".to_vec())];
        assert_eq!(all(&input, 8), expected);
        let Some(Line::TooLong(kept)) = all(&b"d".repeat(2 * KEPT_BYTES), KEPT_BYTES).pop() else { panic!() };
        assert_eq!(kept.len(), KEPT_BYTES);
    }

    #[test]
    fn line_ends_between_tokens_become_spaces() {
        assert_eq!(one_line(b"\r\n{\r\n\"a\":\n1}\n"), b"{  \"a\": 1}");
    }

    #[tokio::test]
    async fn a_reader_that_goes_away_closes_the_output() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (output, end) = write(Gone).unwrap();
        output.send(b"x".to_vec()).await.unwrap();
        end.await.unwrap();
        output.closed().await;
    }
}
