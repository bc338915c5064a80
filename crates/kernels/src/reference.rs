//! The oracle: attention and matrix product in plain f64, written for reading.

/// One visible key/value row of a head, in f64, with the query already rotated for it.
pub struct Row<'a> {
    /// Query of the segment the row belongs to.
    pub query: &'a [f64],
    /// Key.
    pub k: Vec<f64>,
    /// Value.
    pub v: Vec<f64>,
}

/// `softmax(q·k) · v` over rows.
pub fn attention(rows: &[Row<'_>]) -> Vec<f64> {
    let score = |r: &Row<'_>| r.query.iter().zip(&r.k).map(|(a, b)| a * b).sum::<f64>();
    let scores: Vec<f64> = rows.iter().map(score).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    let dim = rows.first().map_or(0, |r| r.v.len());
    (0..dim)
        .map(|d| rows.iter().zip(&weights).map(|(r, w)| w * r.v[d]).sum::<f64>() / total)
        .collect()
}

/// `a[m][k] · wᵀ` with `w[n][k]`.
pub fn matmul(a: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let dot =
        |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    a.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |y| dot(x, y))).collect()
}

/// `R(position) · x` in f64.
pub fn rotate(rope: &crate::RotaryEmbedding, position: i64, x: &[f64]) -> Vec<f64> {
    let half = x.len() / 2;
    let mut out = vec![0.0; x.len()];
    for (p, freq) in rope.inv_freq.iter().enumerate() {
        let (a, b) = match rope.style {
            crate::RopeStyle::Interleaved => (2 * p, 2 * p + 1),
            crate::RopeStyle::HalfSplit => (p, p + half),
        };
        let (sin, cos) = (position as f64 * freq).sin_cos();
        out[a] = (x[a] * cos - x[b] * sin) * rope.magnitude;
        out[b] = (x[a] * sin + x[b] * cos) * rope.magnitude;
    }
    out
}
