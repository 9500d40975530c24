//! WAV files: how long one is, and making one.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

/// How long a file plays.
///
/// # Errors
/// If it is no WAV file, or none with sound in it.
pub(super) fn duration(path: &Path) -> io::Result<Duration> {
    let mut file = File::open(path)?;
    let whole = file.metadata()?.len();
    let mut head = [0; 12];
    file.read_exact(&mut head)?;
    if &head[..4] != b"RIFF" || &head[8..] != b"WAVE" {
        return Err(invalid("not a WAV file"));
    }
    let mut bytes_per_second = 0;
    loop {
        let mut chunk = [0; 8];
        file.read_exact(&mut chunk)?;
        let size = u64::from(number(&chunk[4..]));
        if &chunk[..4] == b"data" {
            // A program that wrote to a pipe did not know the size.
            let size = size.min(whole - file.stream_position()?);
            if bytes_per_second == 0 || size == 0 {
                return Err(invalid("a WAV file without sound"));
            }
            return Ok(Duration::from_millis(size * 1000 / u64::from(bytes_per_second)));
        }
        let mut rest = size + size % 2;
        if &chunk[..4] == b"fmt " && size >= 16 {
            let mut format = [0; 16];
            file.read_exact(&mut format)?;
            bytes_per_second = number(&format[8..12]);
            rest -= 16;
        }
        file.seek(SeekFrom::Current(i64::try_from(rest).map_err(|_| invalid("a malformed WAV file"))?))?;
    }
}

/// A file with these samples of one channel.
pub(super) fn mono(sample_rate: usize, samples: &[i16]) -> Vec<u8> {
    let size = samples.len() * 2;
    let mut file = Vec::with_capacity(44 + size);
    let mut write = |text: &[u8], numbers: &[usize]| {
        file.extend_from_slice(text);
        for number in numbers {
            file.extend_from_slice(&u32::try_from(*number).unwrap_or(u32::MAX).to_le_bytes());
        }
    };
    write(b"RIFF", &[36 + size]);
    // PCM, one channel; two bytes a sample, 16 bits.
    write(b"WAVEfmt \x10\0\0\0\x01\0\x01\0", &[sample_rate, 2 * sample_rate]);
    write(b"\x02\0\x10\0data", &[size]);
    file.extend(samples.iter().flat_map(|sample| sample.to_le_bytes()));
    file
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::capabilities::scratch::Scratch;

    #[test]
    fn what_is_made_is_as_long_as_its_samples() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().join("x.wav");
        let bytes = mono(16_000, &[0x0102; 4000]);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!((duration(&path).unwrap(), bytes.len()), (Duration::from_millis(250), 8044));
        assert_eq!(&bytes[44..48], [2, 1, 2, 1]);
    }

    #[test]
    fn the_duration_is_that_of_the_sound() {
        let scratch = Scratch::new().unwrap();
        let duration = |bytes: &[u8]| {
            let path = scratch.path().join("x.wav");
            std::fs::write(&path, bytes).unwrap();
            duration(&path).map(|duration| duration.as_millis()).map_err(|error| error.kind())
        };
        let sound = |size: u32| {
            let format: [&[u8]; 3] = [&[1, 0, 1, 0], &16_000_u32.to_le_bytes(), &32_000_u32.to_le_bytes()];
            let head = [b"RIFF\0\0\0\0WAVELIST\x03\0\0\0abc\0fmt \x10\0\0\0", &*format.concat(), &[2, 0, 16, 0]];
            [&*head.concat(), b"data", &size.to_le_bytes(), &[0; 16_000]].concat()
        };
        assert_eq!((duration(&sound(16_000)), duration(&sound(8_000))), (Ok(500), Ok(250)));
        assert_eq!(duration(&sound(0x7fff_f000)), Ok(500), "written to a pipe");
        assert_eq!(duration(&sound(0)), Err(io::ErrorKind::InvalidData));
        assert_eq!(duration(b"RIFF\0\0\0\0AVI data"), Err(io::ErrorKind::InvalidData));
        for cut in [0, 11, 30] {
            assert_eq!(duration(&sound(1)[..cut]), Err(io::ErrorKind::UnexpectedEof));
        }
    }
}
