// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package networkdriver

import (
	"context"

	"github.com/cilium/hive/cell"
	corev1 "k8s.io/api/core/v1"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/truncate"
)

const (
	// eventBurst and eventRate, per second, limit the events about one pod.
	eventBurst = 5
	eventRate  = 1. / 60
	// maxEventMessage is the API's limit.
	maxEventMessage = 1024
)

// podEvents are the driver's events, about pods most of all.
type podEvents struct {
	client      kubernetes.Interface
	node        string
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
}

var _ attachments.Events = (*podEvents)(nil)

func newPodEvents(client kubernetes.Interface, node string) *podEvents {
	broadcaster := record.NewBroadcaster(record.WithCorrelatorOptions(record.CorrelatorOptions{BurstSize: eventBurst, QPS: eventRate}))
	return &podEvents{client, node, broadcaster, broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "cilium-network-driver", Host: node})}
}

// Run sends events until the context ends.
func (e *podEvents) Run(ctx context.Context, _ cell.Health) error {
	sending := e.broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: e.client.CoreV1().Events("")})
	<-ctx.Done()
	sending.Stop()
	e.broadcaster.Shutdown()
	return nil
}

// Warn implements [attachments.Events].
func (e *podEvents) Warn(s attachments.Sandbox, reason, message string) {
	pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: s.PodNamespace, Name: s.PodName, UID: s.PodUID}
	e.recorder.Event(pod, corev1.EventTypeWarning, reason, truncate.UTF8(message, maxEventMessage))
}

// warnNode makes an event about the node, under the UID that kubelet uses in its own.
func (e *podEvents) warnNode(reason, message string) {
	node := &corev1.ObjectReference{Kind: "Node", Name: e.node, UID: kubetypes.UID(e.node)}
	e.recorder.Event(node, corev1.EventTypeWarning, reason, truncate.UTF8(message, maxEventMessage))
}
