// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/hive/cell"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// part is a part of which the test ends the runs.
type part struct {
	*parts
	health *cell.SimpleHealth
	runs   atomic.Int32
	// end ends a run, failing when it is closed all of them.
	end     chan error
	failing chan struct{}
}

// startPart keeps a part running in a synctest bubble until the test's end.
func startPart(t *testing.T, name string) *part {
	t.Helper()
	_, health := cell.NewSimpleHealth()
	p := &part{parts: newParts(slog.New(slog.DiscardHandler)), health: health, end: make(chan error), failing: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.keep(ctx, health, name, func(ctx context.Context) error {
			p.runs.Add(1)
			select {
			case err := <-p.end:
				return err
			case <-p.failing:
				return errors.New("table is gone")
			case <-ctx.Done():
				return nil
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		failures, _ := p.state()
		require.Empty(t, failures, "to be stopped is no failure")
	})
	return p
}

// degraded is the condition that the failures make.
func (p *part) degraded(t *testing.T) metav1.Condition {
	t.Helper()
	var v view
	failures, _ := p.state()
	v.addFailures(failures)
	return condition(t, v.status(), v2alpha1.ConditionDegraded)
}

func (p *part) pass(d time.Duration) {
	time.Sleep(d) // the bubble's time
	synctest.Wait()
}

func TestPartThatFailsOnceIsStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := startPart(t, "inventory")
		synctest.Wait()
		require.Equal(t, metav1.ConditionFalse, p.degraded(t).Status)

		_, changed := p.state()
		p.end <- errors.New("table is gone")
		synctest.Wait()
		<-changed
		c := p.degraded(t)
		require.Equal(t, metav1.ConditionTrue, c.Status)
		require.Equal(t, reasonPartFailed, c.Reason)
		require.Contains(t, c.Message, "inventory")
		require.Contains(t, c.Message, "table is gone")
		require.Equal(t, cell.StatusDegraded, p.health.Level)
		require.EqualValues(t, 1, p.runs.Load())

		p.pass(minPartDelay)
		require.EqualValues(t, 2, p.runs.Load(), "it is started again")
		require.Equal(t, metav1.ConditionTrue, p.degraded(t).Status, "whether it runs now has to show")
		_, changed = p.state()
		p.pass(soundAfter)
		<-changed
		require.Equal(t, metav1.ConditionFalse, p.degraded(t).Status)
		require.Equal(t, cell.StatusOK, p.health.Level)
		p.pass(time.Hour)
		require.NoError(t, p.hopeless())
		require.EqualValues(t, 2, p.runs.Load())

		p.end <- nil
		synctest.Wait()
		require.Contains(t, p.degraded(t).Message, errEnded.Error())
		p.pass(minPartDelay)
		require.EqualValues(t, 3, p.runs.Load(), "after a sound run the delay is the shortest again")
	})
}

func TestPartThatKeepsFailingStaysVisible(t *testing.T) {
	for name, want := range map[string]string{
		"inventory": "the part inventory has been failing for 5m0s, only a restart of the agent may help: table is gone",
		"driver":    "the part driver has been failing for 5m0s, only a restart of the agent may help: table is gone",
		"kubelet":   "", // a restart does no more than another attempt
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := startPart(t, name)
				close(p.failing)
				for range int(hopelessAfter / time.Second) {
					synctest.Wait()
					require.Equal(t, metav1.ConditionTrue, p.degraded(t).Status)
					require.Equal(t, cell.StatusDegraded, p.health.Level)
					require.NoError(t, p.hopeless())
					p.pass(time.Second)
				}
				require.Less(t, p.runs.Load(), int32(12), "the delay grows")
				if want == "" {
					require.NoError(t, p.hopeless())
				} else {
					require.EqualError(t, p.hopeless(), want)
				}
			})
		})
	}
}
