// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nri

import (
	"context"
	"fmt"
	"log/slog"
)

// stubLogger lets the NRI stub log through slog. The stub tells every step at info level, which is detail here.
type stubLogger struct{ log *slog.Logger }

func (l stubLogger) write(ctx context.Context, level slog.Level, format string, args []any) {
	if l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, fmt.Sprintf(format, args...))
	}
}

func (l stubLogger) Debugf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelDebug, format, args)
}

func (l stubLogger) Infof(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelDebug, format, args)
}

func (l stubLogger) Warnf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelWarn, format, args)
}

func (l stubLogger) Errorf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelError, format, args)
}
