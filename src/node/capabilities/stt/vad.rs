//! Finding speech in sound by its loudness.
//!
//! A room is never silent, so a frame counts as loud only against the quietest one of the last seconds. Speech begins
//! with several loud frames and is over after a pause; a knock is too short to be speech.

use std::collections::VecDeque;
use std::ops::Range;

use super::SAMPLE_RATE;

/// The samples of one frame.
const FRAME: usize = SAMPLE_RATE / 50;
/// The length of a frame.
const FRAME_MS: usize = 20;
/// How many frames back the quietest one is looked for.
const WINDOW: usize = 3000 / FRAME_MS;
/// How much louder than the quietest frame a loud one is.
const RATIO: f64 = 3.0;
/// How loud a loud frame is at least, as the root mean square of its samples.
const LEAST: f64 = 150.0;
/// So many loud frames in a row begin speech.
const ONSET: usize = 80 / FRAME_MS;
/// So many quiet frames in a row end it.
const PAUSE: usize = 800 / FRAME_MS;
/// Speech has at least so many loud frames.
const SHORTEST: usize = 160 / FRAME_MS;

/// A listener for speech.
#[derive(Debug, Default)]
pub(super) struct Vad {
    /// The samples of a frame that is not complete.
    rest: Vec<i16>,
    levels: VecDeque<f64>,
    /// How many frames there were.
    frames: usize,
    /// How many loud ones there were in a row up to now.
    loud_run: usize,
    /// How many loud ones there were since the speech began.
    loud: usize,
    /// The first and the last loud frame of the speech.
    speech: Option<(usize, usize)>,
}

impl Vad {
    /// Listens on.
    pub(super) fn push(&mut self, samples: &[i16]) {
        self.rest.extend_from_slice(samples);
        let samples = std::mem::take(&mut self.rest);
        let frames = samples.chunks_exact(FRAME);
        self.rest = frames.remainder().to_vec();
        frames.for_each(|frame| self.hear(level(frame)));
    }

    fn hear(&mut self, level: f64) {
        if self.levels.len() == WINDOW {
            self.levels.pop_front();
        }
        self.levels.push_back(level);
        let quietest = self.levels.iter().copied().fold(f64::INFINITY, f64::min);
        let frame = self.frames;
        self.frames += 1;
        if level < LEAST.max(RATIO * quietest) {
            self.loud_run = 0;
            if self.is_over() && self.loud < SHORTEST {
                // A knock.
                self.speech = None;
            }
            return;
        }
        self.loud_run += 1;
        match &mut self.speech {
            Some((_, last)) => {
                *last = frame;
                self.loud += 1;
            }
            None if self.loud_run == ONSET => {
                self.speech = Some((frame + 1 - ONSET, frame));
                self.loud = ONSET;
            }
            None => {}
        }
    }

    /// Whether somebody has spoken, and has been silent since.
    pub(super) fn is_over(&self) -> bool {
        self.speech.is_some_and(|(_, last)| self.frames - 1 - last >= PAUSE)
    }

    /// From when to when somebody has spoken, in milliseconds.
    pub(super) fn speech(&self) -> Option<Range<usize>> {
        let (first, last) = self.speech.filter(|_| self.loud >= SHORTEST)?;
        Some(first * FRAME_MS..(last + 1) * FRAME_MS)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a frame has few samples")]
fn level(frame: &[i16]) -> f64 {
    let squares: f64 = frame.iter().map(|sample| f64::from(*sample).powi(2)).sum();
    (squares / frame.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sound: `milliseconds` of each loudness, as a tone that is on and off as syllables are.
    fn sound(parts: &[(usize, i16)]) -> Vec<i16> {
        let part = |&(milliseconds, peak): &(usize, i16)| {
            (0..milliseconds * SAMPLE_RATE / 1000).map(move |n| if n % 40 < 20 { peak } else { -peak })
        };
        parts.iter().flat_map(part).collect()
    }

    fn heard(parts: &[(usize, i16)]) -> (Option<Range<usize>>, bool) {
        let mut vad = Vad::default();
        // In pieces that are no frames.
        sound(parts).chunks(777).for_each(|piece| vad.push(piece));
        (vad.speech(), vad.is_over())
    }

    #[test]
    fn speech_begins_with_loudness_and_is_over_after_a_pause() {
        assert_eq!(heard(&[(1000, 0), (500, 3000), (700, 0)]), (Some(1000..1500), false));
        assert_eq!(heard(&[(1000, 0), (500, 3000), (900, 0)]), (Some(1000..1500), true));
        // A short pause is part of it; so is what follows a long one, for who still listens.
        assert_eq!(heard(&[(200, 0), (300, 3000), (400, 0), (300, 3000), (900, 0)]), (Some(200..1200), true));
        assert_eq!(heard(&[(200, 0), (300, 3000), (2000, 0), (300, 3000), (100, 0)]), (Some(200..2800), false));
    }

    #[test]
    fn silence_noise_and_knocks_are_no_speech() {
        assert_eq!(heard(&[]), (None, false));
        assert_eq!(heard(&[(5000, 0)]), (None, false));
        assert_eq!(heard(&[(5000, 100)]), (None, false));
        assert_eq!(heard(&[(5000, 1000)]), (None, false), "a fan");
        assert_eq!(heard(&[(500, 0), (60, 9000), (900, 0)]), (None, false), "a knock");
        assert_eq!(heard(&[(500, 0), (100, 9000), (900, 0)]), (None, false), "a longer one");
        assert_eq!(heard(&[(500, 0), (100, 9000), (900, 0), (500, 3000), (900, 0)]), (Some(1500..2000), true));
    }

    #[test]
    fn a_noisy_room_only_asks_for_louder_speech() {
        assert_eq!(heard(&[(2000, 500), (400, 1000), (900, 500)]), (None, false));
        assert_eq!(heard(&[(2000, 500), (400, 3000), (900, 500)]), (Some(2000..2400), true));
    }
}
